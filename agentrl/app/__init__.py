"""The composition root: the only package that knows every part.

`assemble_orchestrator` wires given parts into an `Orchestrator`; `training` and `evaluation` make the parts that a
configuration names.
"""
