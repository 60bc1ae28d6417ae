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
    """Tokens [batch, tokens, channels]; their grid's sides, or the coordinates of each, are arguments.

    Coordinates [batch, 3, tokens] of a whole grid have as many different values on an axis as it is long.
    """
    coordinates = arguments.get("video_coords")
    names = ("num_frames", "height", "width")
    sides = [arguments[name] for name in names if arguments.get(name) is not None]
    if coordinates is not None:
        sides = [axis.unique().numel() for axis in coordinates[0]]
    if len(sides) != 3:
        raise ValueError(
            "the transformer is called without num_frames, height and width, or video_coords; "
            "one of these must say where tokens lie while self-attention is swapped"
        )
    grid = TokenGrid(*sides)
    tokens = arguments["hidden_states"].shape[1]
    if grid.tokens != tokens:
        raise ValueError(
            f"hidden_states has {tokens} tokens, and their grid {' x '.join(map(str, grid.thw))}; "
            "condition tokens beside the clip's are not supported while self-attention is swapped"
        )
    return grid
