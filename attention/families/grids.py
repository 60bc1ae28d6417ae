"""How many tokens a clip has, from a transformer's configuration and the arguments of a forward pass."""

from attention.backends import TokenGrid
from attention.families.family import Arguments, Config


def three_patches(config: Config, arguments: Arguments) -> TokenGrid:
    """Latents [batch, channels, time, height, width], a patch for each axis."""
    shape = arguments["hidden_states"].shape[2:]
    return TokenGrid(*(side // patch for side, patch in zip(shape, config.patch_size, strict=True)))


def two_patches(config: Config, arguments: Arguments) -> TokenGrid:
    """The same, one patch for time and one for both other axes."""
    frames, height, width = arguments["hidden_states"].shape[2:]
    side = config.patch_size
    return TokenGrid(frames // config.patch_size_t, height // side, width // side)


def whole_frames(config: Config, arguments: Arguments) -> TokenGrid:
    """Latents [batch, channels, time, height, width], patches of one frame."""
    frames, height, width = arguments["hidden_states"].shape[2:]
    return TokenGrid(frames, height // config.patch_size, width // config.patch_size)


def frames_first(config: Config, arguments: Arguments) -> TokenGrid:
    """Latents [batch, time, channels, height, width]; the last patch in time may be cut short."""
    _, frames, _, height, width = arguments["hidden_states"].shape
    side = config.patch_size
    return TokenGrid(-(-frames // (config.patch_size_t or 1)), height // side, width // side)


def packed(config: Config, arguments: Arguments) -> TokenGrid:
    """Tokens [batch, tokens, channels], with the sides of their grid as arguments."""
    sides = {name: arguments.get(name) for name in ("num_frames", "height", "width")}
    if None in sides.values():
        missing = ", ".join(name for name, side in sides.items() if side is None)
        raise ValueError(f"self-attention is swapped, and the transformer is called without {missing}")
    grid = TokenGrid(*sides.values())  # type: ignore[arg-type]
    tokens = arguments["hidden_states"].shape[1]
    if grid.tokens != tokens:
        raise ValueError(
            f"num_frames, height and width say {grid.tokens} tokens, hidden_states has {tokens}; "
            "extra condition tokens are not supported while self-attention is swapped"
        )
    return grid
