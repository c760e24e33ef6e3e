"""Parses the JSON bodies of control calls."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from expertd.service.http.protocol import OipError
from expertd.service.sentences import expected_and_got, shortened

Body = TypeVar("Body", bound=BaseModel)


def parsed(model: type[Body], body: bytes) -> Body:
    """The body as a `model`. Raises OipError: 400 if it is not JSON, 422 if a value is not valid."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = shortened(".".join(map(str, first["loc"]))) or "body"
        status = 400 if first["type"] == "json_invalid" else 422
        raise OipError(status, f"{where}: {expected_and_got(first)}") from error
