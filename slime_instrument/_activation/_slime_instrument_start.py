"""What ``slime_instrument.pth`` and ``slime_instrument.start`` call at interpreter start.

Installed beside the package, not in it: importing the package arms already, and a ``.start`` file cannot look at the
environment before it imports. Imports ``os`` alone, and is silent whatever state the install is in: an interpreter
that starts must never fail, or print, because of us.
"""

import os

__all__ = ["start"]

# Spelled as in slime_instrument._switch, which must not be imported while the variable is off.
OFF = ("", "0", "false", "no", "off")


def start(file: str = ".start") -> None:
    """Arm this process if ``SLIME_INSTRUMENT`` says so. ``file``: what called, for the arming route."""
    if os.environ.get("SLIME_INSTRUMENT", "").strip().lower() in OFF:
        return
    try:
        from slime_instrument._activation.boot import boot

        boot(f"SLIME_INSTRUMENT in the environment ({file})")
    except Exception:
        # A half-removed or broken install. What works and then fails to arm is logged by boot itself.
        return
