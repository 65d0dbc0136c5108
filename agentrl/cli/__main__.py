"""`python -m agentrl.cli`: the `agentrl` command without its script."""

import sys

from agentrl.cli.main import main

sys.exit(main())
