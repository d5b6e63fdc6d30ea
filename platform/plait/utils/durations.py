"""Durations as text for people."""


def duration(seconds: float) -> str:
    """The duration as text: 12 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def precise(seconds: float) -> str:
    """The seconds as text with a decimal; below ten with three digits, because a step may take a fraction of
    one: 1,234.5 s, 0.0123 s, 45.6 µs."""
    if 0 < seconds < 0.9995e-3:  # above it three digits are a thousand
        return f"{1e6 * seconds:.3g} µs"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.3g} s"
