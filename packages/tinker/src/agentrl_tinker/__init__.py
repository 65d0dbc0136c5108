"""The Tinker server: clients that keep their loop train and sample on the models, the engine and the journal of a run.

`service.py` executes requests, and `http_server.py` receives them. Of the core, only the command imports this package.
"""
