"""Who samples: adapters of the Engine port."""

from agentrl.core.broken_builds import hide_broken_builds

hide_broken_builds()
