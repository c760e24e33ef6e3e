"""The Helm chart: what it renders is valid, agrees with itself, and with the server and its image."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertd.service.http.rights import CALLS
from expertd.service.settings.loader import load_settings
from expertd.service.settings.model import Settings
from tests.chart.rendering import (
    CHART,
    NAMESPACE,
    Helm,
    Object,
    container,
    data,
    environment,
    headless,
    mistakes,
    one,
    service,
    templates,
)
from tests.paths import ROOT
from tests.prometheus.processes import rules
from tests.test_container import arguments_of, image_environment

Values = dict[str, Any]
KEYS: Values = {"keys": {"secretName": "expertd-keys"}}
LAYER: Values = {
    "name": "a", "hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2,
}  # fmt: skip
MONITORED: Values = {
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "credentials": {"name": "expertd-prometheus", "key": "key"},
    },
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}
CASES: dict[str, Values] = {
    "one GPU": KEYS,
    "a CPU without keys": {
        "insecure": True,
        "gpus": 0,
        "image": {"tag": "cpu"},
        "settings": {"backend": "reference"},
    },
    "everything": {
        **KEYS,
        **MONITORED,
        "tls": {"secretName": "expertd-tls"},
        "autoscaling": {"enabled": True},
        "models": {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        "cache": {"volume": {"persistentVolumeClaim": {"claimName": "cache"}}},
        "env": [{"name": "OMP_NUM_THREADS", "value": "8"}],
        "imagePullSecrets": [{"name": "registry"}],
        "runtimeClassName": "nvidia",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {}},
        "podAnnotations": {"team": "moe"},
        "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
        "serviceAccount": {"annotations": {"role": "reader"}},
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "attention"}}}]},
    },
    "several nodes": {
        **KEYS,
        **MONITORED,
        "nodes": 2,
        "gpus": 8,
        "settings": {"devices": "0-7"},
        "autoscaling": {"enabled": True},
    },
    "channels over NIXL": {
        **KEYS,
        "nodes": 2,
        "settings": {"devices": "0-7", "channels": {"nixl": True}},
        "nixl": {"resource": "rdma/hca"},
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "attention"}}}]},
    },
    "settings in other forms": {
        **KEYS,
        "settings": {
            "log_level": "INFO",
            "devices": [0, 1],
            "partitions": {"compute": 112},
            "channels": {"socket": "/run/expertd/channels", "group": 10001},
            "models": [{**LAYER, "local_experts": "0-3"}],
            "placement": {"interval_seconds": 30},
            "checkpoints": [{"path": "/models", "layers": 3}],
            "limits": {"max_buffered_bytes": 3 << 30},
        },
    },
    "OpenShift": {
        **KEYS,
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"name": "moe"},
    },
}


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, list[Object]]:
    """Each case's objects."""
    return {case: helm.render(values) for case, values in CASES.items()}


def is_matched(labels: dict[str, str], selector: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_lint_finds_nothing_and_versions_are_the_projects(helm: Helm) -> None:
    done = helm.run("lint", CHART, "--strict", values=CASES["everything"])
    assert done.returncode == 0, done.stdout + done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("case", CASES)
def test_objects_fit_the_schemas_of_their_kinds(case: str, rendered: dict[str, list[Object]]) -> None:
    assert [line for each in rendered[case] for line in mistakes(each)] == []


def test_every_template_is_rendered_by_a_case(rendered: dict[str, list[Object]]) -> None:
    kinds = {each["kind"] for objects in rendered.values() for each in objects}
    written = {
        kind
        for path in (CHART / "templates").glob("*.yaml")
        for kind in re.findall(r"^kind: (\w+)$", path.read_text(), re.M)
    }
    assert kinds == written


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "keys.secretName: expected the name of a Secret with API keys, or insecure: true; got neither"),
        ({**KEYS, "insecure": True}, "insecure: expected false with keys.secretName"),
        ({**KEYS, "nodes": 2}, "settings.devices: expected the GPUs of each node"),
        ({**KEYS, "replicas": -1}, "/replicas"),
        ({**KEYS, "replica": 2}, "replica"),
        ({**KEYS, "settings": {"host": "::"}}, "/settings/host"),
        ({**KEYS, "settings": {"drain_timeout_seconds": "30s"}}, "/settings/drain_timeout_seconds"),
        ({**KEYS, "settings": {"log_fromat": "json"}}, "log_fromat"),
        ({**KEYS, "settings": {"limits": {"max_batch_token": 8}}}, "/settings/limits"),
        ({**KEYS, "settings": {"models": [{**LAYER, "topk": 8}]}}, "/settings/models/0"),
        ({**KEYS, "settings": {"models": [{**LAYER, "routing": {"scoring_func": "tanh"}}]}}, "scoring_func"),
        ({**KEYS, "settings": {"checkpoints": [{"path": "/models", "layer": 3}]}}, "/settings/checkpoints/0"),
        ({**KEYS, "settings": {"limits": {"max_batch_tokens": 0}}}, "/settings/limits/max_batch_tokens"),
        ({**KEYS, "serviceMonitor": {"credentials": {"name": "prometheus"}}}, "/serviceMonitor/credentials"),
    ],
)
def test_wrong_values_are_refused(values: Values, said: str, helm: Helm) -> None:
    assert said in helm.refusal(values)


@pytest.mark.parametrize("case", CASES)
def test_the_server_accepts_its_settings(
    case: str, rendered: dict[str, list[Object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = one([each for each in rendered[case] if "config.yaml" in each.get("data", {})], "ConfigMap")[
        "data"
    ]
    config = tmp_path / "config.yaml"
    config.write_text(text["config.yaml"])
    for name, value in {**image_environment(), **environment(templates(rendered[case])[0])}.items():
        if name.startswith("EXPERTD_"):
            monkeypatch.setenv(name, value)
    settings = load_settings(config)
    assert settings.host == "0.0.0.0"
    ports = container(templates(rendered[case])[0])["ports"]
    assert [port["containerPort"] for port in ports] == [settings.port]


def test_settings_that_belong_to_the_chart_are_settings() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]["settings"][
        "properties"
    ]
    assert {name for name, value in schema.items() if value is False} <= Settings.model_fields.keys()
    assert schema.keys() <= Settings.model_fields.keys()


@pytest.mark.parametrize(
    ("delay", "drain"), [(None, None), (0, 0.5), (12.5, 90)], ids=["defaults", "short", "long"]
)
def test_pods_are_given_longer_than_the_server_may_drain(
    delay: float | None, drain: float | None, helm: Helm
) -> None:
    given = {"shutdown_delay_seconds": delay, "drain_timeout_seconds": drain}
    settings = {name: value for name, value in given.items() if value is not None}
    objects = helm.render({**CASES["several nodes"], "settings": {"devices": "0-7", **settings}})
    used = yaml.safe_load(data(objects, "config.yaml"))
    for template in templates(objects):
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= used["shutdown_delay_seconds"] + used["drain_timeout_seconds"] + 10
        assert isinstance(grace, int)


@pytest.mark.parametrize("case", CASES)
def test_probes_call_what_needs_no_key(case: str, rendered: dict[str, list[Object]]) -> None:
    front, *others = templates(rendered[case])
    scheme = "HTTPS" if CASES[case].get("tls") else "HTTP"
    paths = {"startupProbe": "live", "readinessProbe": "ready", "livenessProbe": "live"}
    for name, path in paths.items():
        call = container(front)[name]["httpGet"]
        assert call == {"path": f"/v2/health/{path}", "port": "http", "scheme": scheme}
        assert CALLS[f"GET {call['path']}"] == ()
        assert [each for each in others if name in container(each)] == [], "an agent has no port"


@pytest.mark.parametrize("case", CASES)
def test_pods_can_write_to_the_cache_only(case: str, rendered: dict[str, list[Object]]) -> None:
    for template in templates(rendered[case]):
        server, pod = container(template), template["spec"]
        assert server["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        mounts = {each["name"]: each for each in server["volumeMounts"]}
        written = {name: each["mountPath"] for name, each in mounts.items() if not each.get("readOnly")}
        assert written == {"cache": image_environment()["EXPERTD_CACHE_DIR"], "shared-memory": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()
    assert arguments_of("USER") == ["10001:10001"]


def test_an_orchestrator_may_choose_the_uid(rendered: dict[str, list[Object]]) -> None:
    context = templates(rendered["OpenShift"])[0]["spec"]["securityContext"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods(case: str, rendered: dict[str, list[Object]]) -> None:
    objects = rendered[case]
    pods = [template["metadata"]["labels"] for template in templates(objects)]
    is_grouped = len(pods) > 1
    if is_grouped:  # set by the controller
        pods = [
            {**labels, "leaderworkerset.sigs.k8s.io/worker-index": str(n)} for n, labels in enumerate(pods)
        ]
    for each in (service(objects), headless(objects)):
        found = [is_matched(labels, each["spec"]["selector"]) for labels in pods]
        assert found == [True, False][: len(pods)]
    for each in objects:
        if each["kind"] in ("PodDisruptionBudget", "StatefulSet"):
            assert all(is_matched(labels, each["spec"]["selector"]["matchLabels"]) for labels in pods)
        if each["kind"] == "NetworkPolicy":
            assert all(is_matched(labels, each["spec"]["podSelector"]["matchLabels"]) for labels in pods)
        if each["kind"] == "ServiceMonitor":
            selector = each["spec"]["selector"]["matchLabels"]
            monitored = [
                is_matched(of["metadata"]["labels"], selector) for of in (service(objects), headless(objects))
            ]
            assert monitored == [False, True], "each pod is scraped once"
        if each["kind"] == "HorizontalPodAutoscaler":
            target = each["spec"]["scaleTargetRef"]
            scaled = one(objects, target["kind"])
            assert (scaled["apiVersion"], scaled["metadata"]["name"]) == (
                target["apiVersion"],
                target["name"],
            )
            assert "replicas" not in scaled["spec"], "it would undo the autoscaler at each upgrade"


@pytest.mark.parametrize("case", CASES)
def test_a_pool_finds_the_servers(case: str, rendered: dict[str, list[Object]]) -> None:
    objects = rendered[case]
    of_pool = headless(objects)
    (port,), (of_server,) = of_pool["spec"]["ports"], container(templates(objects)[0])["ports"]
    assert port["targetPort"] == of_server["name"]
    assert port["port"] == of_server["containerPort"], "callers have the pods' addresses"
    assert of_pool["spec"]["publishNotReadyAddresses"] is True
    for each in objects:
        if each["kind"] == "StatefulSet":
            assert each["spec"]["serviceName"] == of_pool["metadata"]["name"]
        if each["kind"] == "LeaderWorkerSet":  # else its controller makes no headless one for itself
            names = {of["metadata"]["name"] for of in (service(objects), of_pool)}
            assert each["metadata"]["name"] not in names


@pytest.mark.parametrize("case", ["one GPU", "everything", "several nodes"])
def test_an_installation_says_what_callers_need(
    case: str, helm: Helm, rendered: dict[str, list[Object]]
) -> None:
    said, objects = helm.notes(CASES[case]), rendered[case]
    of_pool, others = (each["metadata"]["name"] for each in (headless(objects), service(objects)))
    if "tls" in CASES[case]:  # which needs names that a certificate has, of pods
        name = one(objects, "StatefulSet")["metadata"]["name"]
        assert f"\n  https://{name}-0.{of_pool}.{NAMESPACE}.svc:8000\n" in said
        assert f"https://{others}.{NAMESPACE}.svc:8000\n" in said
    else:
        assert f"\n  dns:{of_pool}.{NAMESPACE}.svc:8000\n" in said
        assert f"http://{others}.{NAMESPACE}.svc:8000\n" in said
    ((_, status),) = re.findall(r"rollout status (\w+)/(\S+)", said)
    assert status in {each["metadata"]["name"] for each in objects if each["kind"].endswith("Set")}


@pytest.mark.parametrize("case", ["one GPU", "several nodes"])
def test_names_have_room_for_what_kubernetes_appends(case: str, helm: Helm) -> None:
    objects = helm.render(CASES[case], release=53 * "r")
    for each in (service(objects), headless(objects)):
        assert len(each["metadata"]["name"]) <= 63
    (name,) = [each["metadata"]["name"] for each in objects if each["kind"].endswith("Set")]
    if case == "several nodes":  # the set of a group's workers
        name += "-999"
    assert len(f"{name}-{10 * 'h'}") <= 63, "the label of its revision"


def test_gpus_are_asked_for(rendered: dict[str, list[Object]]) -> None:
    limits = {
        case: [
            container(template)["resources"]["limits"].get("nvidia.com/gpu")
            for template in templates(objects)
        ]
        for case, objects in rendered.items()
    }
    assert limits["one GPU"] == [1]
    assert limits["several nodes"] == [8, 8]
    assert limits["a CPU without keys"] == [None]


def test_nodes_meet_at_the_first(rendered: dict[str, list[Object]]) -> None:
    group = one(rendered["several nodes"], "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    arguments = {tuple(container(group[name])["args"]) for name in ("leaderTemplate", "workerTemplate")}
    assert arguments == {
        (
            "serve",
            "--nnodes=$(LWS_GROUP_SIZE)",
            "--node-rank=$(LWS_WORKER_INDEX)",
            "--rendezvous=$(LWS_LEADER_ADDRESS):29500",
        )
    }


def test_new_settings_replace_the_pods(helm: Helm) -> None:
    def annotation(log_level: str) -> str:
        objects = helm.render({**KEYS, "settings": {"log_level": log_level}})
        text: str = templates(objects)[0]["metadata"]["annotations"]["checksum/settings"]
        return text

    assert annotation("info") == annotation("info") != annotation("debug")


def test_the_monitor_reads_the_metrics(rendered: dict[str, list[Object]]) -> None:
    (endpoint,) = one(rendered["everything"], "ServiceMonitor")["spec"]["endpoints"]
    assert CALLS[f"GET {endpoint['path']}"] == ("metrics",)
    assert endpoint["port"] == headless(rendered["everything"])["spec"]["ports"][0]["name"]
    config = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yml").read_text())
    jobs = [job["job_name"] for job in config["scrape_configs"]]
    assert [each["replacement"] for each in endpoint["relabelings"]] == jobs, "alerts ask for this name"


def test_rules_and_dashboard_are_those_of_configs(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["everything"]
    groups = one(objects, "PrometheusRule")["spec"]["groups"]
    expected = rules("recording.yml") + rules("alerts.yml")
    assert [rule for group in groups for rule in group["rules"]] == expected
    assert len({group["name"] for group in groups}) == len(groups)
    dashboard = ROOT / "configs" / "grafana" / "dashboards" / "expertd.json"
    assert data(objects, "expertd.json").strip() == dashboard.read_text().strip()


def test_only_callers_and_prometheus_reach_the_port(rendered: dict[str, list[Object]]) -> None:
    policy = one(rendered["everything"], "NetworkPolicy")["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [
        {"podSelector": {"matchLabels": {"app": "attention"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    assert policy["egress"] == []
    assert one(rendered["one GPU"], "NetworkPolicy")["spec"]["ingress"][0]["from"][0] == {"podSelector": {}}
    between = one(rendered["several nodes"], "NetworkPolicy")["spec"]["ingress"][1]
    assert between.keys() == {"from"}, "ranks use any port"


def test_callers_over_nixl_reach_the_ports_of_ucx(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["channels over NIXL"]
    for template in templates(objects):
        assert environment(template)["UCX_TCP_PORT_RANGE"] == "21000-21100"
        assert container(template)["resources"]["limits"]["rdma/hca"] == 1
    policy = one(objects, "NetworkPolicy")["spec"]
    ports = [{"protocol": "TCP", "port": 21000, "endPort": 21100}]
    callers = [{"podSelector": {"matchLabels": {"app": "attention"}}}]
    assert policy["ingress"][1] == {"ports": ports, "from": callers}
    assert policy["egress"][0] == {"ports": ports, "to": callers}
    assert len(policy["ingress"]) == len(policy["egress"]) == 3, "and the nodes, and their DNS"


def test_a_server_without_nixl_has_none_of_it(helm: Helm) -> None:
    (template,) = templates(helm.render({**KEYS, "nixl": {"resource": "rdma/hca"}}))
    assert "UCX_TCP_PORT_RANGE" not in environment(template)
    assert "rdma/hca" not in container(template)["resources"]["limits"]
