"""Credit assignment: turns rewards into advantages, and episodes into training samples."""
