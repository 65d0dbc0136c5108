"""Who samples: adapters of the Engine port."""

from agentrl.core.machine import hide_broken_builds

hide_broken_builds()
