"""`python -m agentrl.cli`: the `agentrl` command where its script is not on the path."""

import sys

from agentrl.cli.main import main

sys.exit(main())
