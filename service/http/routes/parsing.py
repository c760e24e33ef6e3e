"""Parses the JSON bodies of control calls."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from expertd.service.http.protocol import OipError, json_of
from expertd.service.util.sentences import expected_and_got, shortened

Body = TypeVar("Body", bound=BaseModel)


def parsed(model: type[Body], body: bytes, invalid: int = 422) -> Body:
    """The body as a `model`. Raises OipError: 400 if it is not JSON, `invalid` if a value is not valid."""
    given = json_of(body, "body")
    try:
        return model.model_validate({} if given is None else given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = list(map(str, first["loc"]))
        if path[:1] == ["memory"]:
            del path[1:2]  # the name of the form of a channel's memory
        where = shortened(".".join(path)) or "body"
        raise OipError(invalid, f"{where}: {expected_and_got(first)}") from error
