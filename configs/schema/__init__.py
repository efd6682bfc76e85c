"""The typed description of a night. Needs pydantic and yaml alone."""

from configs.errors import ConfigError
from configs.schema.loading import load_config, preset_names
from configs.schema.night import NightConfig

__all__ = ["ConfigError", "NightConfig", "load_config", "preset_names"]
