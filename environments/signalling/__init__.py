"""Lewis' signalling game: a code that a speaker and a listener can only learn together."""

from agentrl.environments.signalling.env import Signalling, mutual_information, read_code

__all__ = ["Signalling", "mutual_information", "read_code"]
