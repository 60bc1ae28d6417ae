"""Settings of all tests."""

from hypothesis import settings

# A slow, shared machine must not fail a property: time is never asserted.
settings.register_profile("reelwright", deadline=None)
settings.load_profile("reelwright")
