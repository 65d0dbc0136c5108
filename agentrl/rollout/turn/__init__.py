"""The turns of an agent: sampled by an engine or recalled from the journal, and recorded token by token."""
