"""`python -m agentrl`, the same as `agentrl`."""

import sys

from agentrl.cli.main import main

sys.exit(main())
