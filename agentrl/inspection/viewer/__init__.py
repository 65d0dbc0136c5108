"""The viewer: one HTML page that shows a run, from a file or served on loopback."""
