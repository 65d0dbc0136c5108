"""Scorers: functions that give rewards while an episode runs."""
