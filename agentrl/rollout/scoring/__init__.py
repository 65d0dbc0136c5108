"""Scorers: functions, judges and reward models that give rewards while an episode runs."""
