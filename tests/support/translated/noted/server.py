import verifiers.v1 as vf


class NotesConfig(vf.SharedToolsetConfig):
    pass


class NotesToolset(vf.Toolset[NotesConfig]):
    """A server that verifiers starts as `python -m noted.server`."""

    @vf.tool
    async def secret(self, number: int) -> str:
        """Read the secret word."""
        return f"amber{number}"


if __name__ == "__main__":
    NotesToolset.run()
