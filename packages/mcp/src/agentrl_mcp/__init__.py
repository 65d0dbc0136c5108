"""Tools of MCP servers for agentrl: name an `MCPServer` in `mcp_servers` of a `ToolEnvironment`."""

from agentrl_mcp.servers import MCPServer, MCPToolError

__all__ = ["MCPServer", "MCPToolError"]
