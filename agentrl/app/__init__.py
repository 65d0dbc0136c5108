"""The composition root: the only place that knows every part.

`assemble` wires given parts into an `Orchestrator`; `training` and `evaluation` make the parts a configuration names.
"""
