"""The composition root: the only package that knows every part.

`assemble_orchestrator` wires parts into an `Orchestrator`; `training` and `evaluation` make the parts from a
configuration.
"""
