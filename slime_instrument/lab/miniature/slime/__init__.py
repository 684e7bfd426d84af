"""The miniature: a small trainer with slime's module paths, hooks and habits. It is not slime.

Written for the slime_instrument lab, so that a machine without slime can still train under instrumentation. Names and
signatures are those of slime just before pull request #2266; the model, its parallel wrapper, the pipeline schedules
and the optimizer are Megatron-Core's own.
"""

__miniature__ = True
__version__ = "0+miniature"
