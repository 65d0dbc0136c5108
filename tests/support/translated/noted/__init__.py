from noted.taskset import NotedTaskset

__all__ = ["NotedTaskset"]
