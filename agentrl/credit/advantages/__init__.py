"""Advantage estimators, one file per idea; `credit/estimators.py` has their names."""
