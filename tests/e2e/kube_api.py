"""A small API server of Kubernetes for kubectl, whose pods are processes of this machine."""

import json
import os
import signal
import subprocess
import threading
import uuid
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

KINDS = {"jobs": "Job", "pods": "Pod", "secrets": "Secret"}
GROUPS = {"batch/v1": ["jobs"], "v1": ["pods", "secrets"]}
MOUNT = "/run/astraflow"

CONFIG = """apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "{server}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: lab}}}}]
users: [{{name: test, user: {{token: abc}}}}]
"""


class Cluster:
    """Objects by kind and name, and the processes of pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = {kind: {} for kind in KINDS}
        self.processes = {}
        self.created = []
        self.changed = threading.Condition()

    def create(self, kind, said):
        name = said["metadata"]["name"]
        said["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "lab"}
        said["metadata"]["creationTimestamp"] = stamp()
        with self.changed:
            if name in self.objects[kind]:
                return None
            self.objects[kind][name] = said
            self.created.append(said)
            if kind == "jobs":
                for index in range(said["spec"]["completions"]):
                    self._create_pod(said, f"{name}-{index}-abcde")
            self.changed.notify_all()
        return said

    def _create_pod(self, job, name):
        template = job["spec"]["template"]
        job_name = job["metadata"]["name"]
        labels = {**template["metadata"]["labels"], "job-name": job_name}
        pod = {"metadata": {"name": name, "namespace": "lab", "labels": labels}}
        pod |= {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
        pod["status"] = {"phase": "Pending"}
        self.objects["pods"][name] = pod
        threading.Thread(target=self._run, args=(pod, job_name), daemon=True).start()

    def _run(self, pod, job_name):
        name = pod["metadata"]["name"]
        with self.changed:
            # As with a kubelet, a pod waits for what it mounts.
            self.changed.wait_for(
                lambda: job_name in self.objects["secrets"] or name not in self.objects["pods"]
            )
            if name not in self.objects["pods"]:
                return
            secret = self.objects["secrets"][job_name]
            process = self._start(pod, secret)
            self.processes[name] = process
        code = process.wait()
        code = 128 - code if code < 0 else code
        with self.changed:
            pod["status"] = state(
                "Failed" if code else "Succeeded", {"terminated": {"exitCode": code}}
            )
            self._count(self.objects["jobs"].get(job_name))
            if "deletionTimestamp" in pod["metadata"]:
                self.objects["pods"].pop(name, None)
            self.changed.notify_all()

    def _start(self, pod, secret):
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        mounted = self.folder / name
        mounted.mkdir()
        files = {key: b64decode(text) for key, text in secret.get("data", {}).items()}
        files |= {key: text.encode() for key, text in secret.get("stringData", {}).items()}
        for key, data in files.items():
            (mounted / key).write_bytes(data)
            (mounted / key).chmod(0o400)
        *shell, script = container["command"]
        pod["status"] = state("Running", {"running": {}})
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*shell, script.replace(MOUNT, str(mounted))],
                env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _count(self, job):
        """Say how a Job fares; with the first pod that failed, the others go."""
        if job is None or "status" in job:
            return
        pods = self.pods_of(job)
        phases = [pod["status"]["phase"] for pod in pods]
        if "Failed" in phases:
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
            for pod in pods:
                if pod["status"]["phase"] not in ("Failed", "Succeeded"):
                    self._delete_pod(pod, 30)
        elif phases and set(phases) == {"Succeeded"}:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    def pods_of(self, job):
        name = job["metadata"]["name"]
        pods = list(self.objects["pods"].values())
        return [pod for pod in pods if pod["metadata"]["labels"]["job-name"] == name]

    def delete(self, kind, name, grace_s):
        with self.changed:
            if kind == "pods":
                pod = self.objects["pods"].get(name)
                return pod and self._delete_pod(pod, 30 if grace_s is None else grace_s)
            said = self.objects[kind].pop(name, None)
            for pod in self.pods_of(said) if said and kind == "jobs" else ():
                self._delete_pod(pod, pod["spec"]["terminationGracePeriodSeconds"])
            if said and kind == "jobs":
                self.collect(said["metadata"]["uid"])
            self.changed.notify_all()
        return said

    def collect(self, uid):
        """Delete what has an owner that is gone."""
        secrets = self.objects["secrets"]
        for name, each in list(secrets.items()):
            if uid in [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]:
                del secrets[name]

    def _delete_pod(self, pod, grace_s):
        process = self.processes.get(pod["metadata"]["name"])
        if process is None or process.poll() is not None:
            self.objects["pods"].pop(pod["metadata"]["name"], None)
            return pod
        pod["metadata"]["deletionTimestamp"] = stamp(grace_s)
        with suppress(ProcessLookupError):
            if grace_s <= 1:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.terminate()
        return pod

    def log(self, name, *, follow):
        """Yield what a pod says."""
        process = self.processes[name]
        with (self.folder / f"{name}.log").open("rb") as file:
            while True:
                is_over = process.poll() is not None
                if text := file.read():
                    yield text
                elif is_over or not follow:
                    return
                else:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.1)


def stamp(after_s=0):
    return (datetime.now(UTC) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def state(phase, said):
    return {"phase": phase, "containerStatuses": [{"name": "astraflow", "state": said}]}


def discovery(path):
    """Return what an API server says of its resources; None for what is none of that."""
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "batch/v1", "version": "v1"}
        group = {"name": "batch", "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    if path == "/openapi/v3":
        urls = {"batch/v1": "apis/batch/v1", "v1": "api/v1"}
        root = {key: {"serverRelativeURL": f"/openapi/v3/{key}"} for key in urls.values()}
        return {"paths": root}
    version = path.removeprefix("/openapi/v3").removeprefix("/apis/").removeprefix("/api/")
    if version not in GROUPS:
        return None
    if path.startswith("/openapi"):
        return openapi(version)
    verbs = ["create", "delete", "get", "list", "patch"]
    resources = [
        {"name": name, "singularName": name[:-1], "kind": KINDS[name], "namespaced": True}
        for name in GROUPS[version]
    ]
    listed = [{**each, "verbs": verbs} for each in resources]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def openapi(version):
    """Say that this server checks the fields of what it is given."""
    group, _, number = version.rpartition("/")
    paths = {
        f"/{name}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "responses": {},
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": number,
                    "kind": KINDS[name],
                },
            }
        }
        for name in GROUPS[version]
    }
    info = {"title": "test", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths}


class Handler(BaseHTTPRequestHandler):
    """Answers kubectl."""

    cluster: Cluster

    def log_message(self, *_):
        pass

    def _route(self):
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        _, _, rest = url.path.partition("/namespaces/lab/")
        kind, _, name = rest.partition("/")
        return url.path, kind, name

    def _answer(self, said, code=200):
        if said is None:
            code, said = 404, {"reason": "NotFound", "code": 404}
            said |= {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "none"}
        with self.cluster.changed:
            data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self):
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def do_GET(self):
        path, kind, name = self._route()
        if not kind:
            self._answer(discovery(path))
        elif name.endswith("/log"):
            self._stream(name.removesuffix("/log"))
        elif name:
            self._answer(self.cluster.objects[kind].get(name))
        else:
            self._answer(self._listed(kind))

    def _listed(self, kind):
        asked = [each.split("=") for each in self.query.get("labelSelector", "").split(",") if each]
        with self.cluster.changed:
            items = [
                each
                for each in self.cluster.objects[kind].values()
                if all(each["metadata"]["labels"].get(key) == value for key, value in asked)
            ]
        version = "batch/v1" if kind == "jobs" else "v1"
        return {"kind": f"{KINDS[kind]}List", "apiVersion": version, "metadata": {}, "items": items}

    def _stream(self, name):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for text in self.cluster.log(name, follow="follow" in self.query):
                self.wfile.write(text)

    def do_POST(self):
        _, kind, _ = self._route()
        said = self._body()
        if self.query.get("fieldValidation") != "Strict":
            self._answer({"kind": "Status", "status": "Failure", "message": "unchecked"}, 400)
            return
        self._answer(self.cluster.create(kind, said), 201)

    def do_DELETE(self):
        _, kind, name = self._route()
        self._answer(self.cluster.delete(kind, name, self._body().get("gracePeriodSeconds")))


@contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """Serve; yield the cluster, and what the environment of kubectl says."""
    cluster = Cluster(folder)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("ClusterHandler", (Handler,), {"cluster": cluster})
    )
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = folder / "config"
    config.write_text(CONFIG.format(server=f"http://127.0.0.1:{server.server_port}"))
    try:
        yield cluster, {"KUBECONFIG": str(config), "KUBECACHEDIR": str(folder / "cache")}
    finally:
        server.shutdown()
        server.server_close()
        for process in cluster.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
