from __future__ import annotations

from hypothesis import settings

# machines under load are slow, and a slow example proves nothing
settings.register_profile("chat", deadline=None)
settings.load_profile("chat")
