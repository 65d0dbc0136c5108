"""Running episodes: the runner, asyncio workers, message and token bookkeeping."""
