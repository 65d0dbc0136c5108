"""NeMo-Gym's resources server `workplace_assistant`.

nemo_workplace.py serve PORT | rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import resources_servers.workplace_assistant.app as workplace
import uvicorn
from nemo_gym.server_utils import ServerClient

if __name__ == "__main__":
    if sys.argv[1] == "rows":
        print(json.dumps(str(Path(workplace.__file__).parent / "data" / "example.jsonl")))
    else:
        port = int(sys.argv[2])
        config = workplace.WorkbenchResourcesServerConfig(
            host="127.0.0.1", port=port, entrypoint="", name="workplace_assistant"
        )
        server = workplace.WorkbenchResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
        uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")
