"""Reads environment variables and flags with pydantic-settings, extended by YAML and list indices."""

from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource
from pydantic_settings.sources.utils import parse_env_vars

from expertd.service.settings.yaml_text import parse


class VariableSource(EnvSettingsSource):
    """Reads one variable at a time, so that each value keeps its exact origin."""

    def read(self, name: str, text: str) -> dict[str, Any]:
        """The settings in one variable, as nested mappings; empty if `name` is not a setting.

        Raises YamlTextError for a list or mapping that is not valid YAML.
        """
        variable = {name: text}
        self.env_vars = parse_env_vars(variable, self.case_sensitive, parse_none_str=self.env_parse_none_str)
        return self()

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> Any:
        """Parse a list or mapping as YAML, a superset of JSON except for tabs."""
        return parse(value.replace("\t", " ")).value

    def next_field(
        self, field: FieldInfo | Any | None, key: str, case_sensitive: bool | None = None
    ) -> FieldInfo | None:
        """The field or type at `key` below `field`; in a list, a number selects the type of its entries."""
        annotation = field.annotation if isinstance(field, FieldInfo) else field
        if get_origin(annotation) is tuple:
            entry: FieldInfo | None = get_args(annotation)[0] if key.isdecimal() else None
            return entry  # really a type, as the base class returns for values of a mapping
        return super().next_field(field, key, case_sensitive)
