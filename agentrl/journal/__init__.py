"""The durable log of every episode: entry kinds, the SQLite store, and readers."""
