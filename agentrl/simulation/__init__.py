"""The simulator: the production loop, buffer, scheduler and credit in virtual time, with emulated engine and
trainer.
"""
