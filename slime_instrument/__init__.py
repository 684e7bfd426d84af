"""One aligned train dump per rollout from an unedited slime."""

__version__ = "0.1.0"
