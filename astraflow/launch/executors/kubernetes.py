"""Kubernetes: every trainer and every node is a Job, made and watched by `kubectl`.

The folder of the run has to be on a volume that the launcher and the pods see under one path.
States come from one `kubectl get` every two seconds for all Jobs and pods of the run, whose label
has an id that lies in the folder: a launcher that goes on with the run finds what was left of it.
"""

import asyncio
import json
import shlex
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import yaml
from pydantic import Field

from astraflow.config.strict import Options
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.executors.base import (
    LOST,
    ExecutorOptions,
    PollingExecutor,
    RunPlace,
    WatchedProcess,
    as_yaml,
    attempt,
    call,
    code_of_shell,
    merged,
    require_commands,
    slug,
)
from astraflow.launch.processes import RoleCommand

CONTAINER: Final = "astraflow"
"""Name of that with the process, beside which pods may have others."""

# A machine that says nothing for so long after its pod should have been gone is lost.
_OVERDUE: Final = timedelta(seconds=60)

# What a log takes at most to be read to its end.
_LOG_S: Final = 20.0

_RUN: Final = "astraflow/run"

_SECRETS: Final = Path("/run/astraflow")

# Whoever launched a process starts it again, and knows when not to. The first process of a
# namespace cannot end itself by a signal, which tells how ranks ended; so that is another one. What
# a container gets of /dev/shm is too little for ranks and engines.
_JOB: Final = """
apiVersion: batch/v1
kind: Job
metadata: {}
spec:
  backoffLimit: 0
  ttlSecondsAfterFinished: 86400
  template:
    spec:
      restartPolicy: Never
      shareProcessNamespace: true
      enableServiceLinks: false
      containers:
      - name: astraflow
        volumeMounts:
        - {name: secrets, mountPath: /run/astraflow, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
      volumes:
      - {name: shm, emptyDir: {medium: Memory}}
"""


class KubernetesOptions(ExecutorOptions):
    """Options of the executor kubernetes."""

    python: str = "python"
    """Interpreter of the image that has astraflow installed."""
    image: str
    """Of the pods' container."""
    namespace: str | None = None
    """Unset: that of the context."""
    context: str | None = None
    """Of kubectl's configuration; unset: its current one."""
    claim: str | None = None
    """A PersistentVolumeClaim that holds the folder of the run."""
    mount: Path | None = None
    """Where this machine has that volume, and pods get it; unset: the folder that has the run's."""
    gpu_resource: str = "nvidia.com/gpu"
    """What a GPU is called there."""
    service_account: str | None = None
    """Unset: pods cannot talk to the API server."""
    grace_s: int = Field(default=600, ge=1)
    """Seconds that a pod has between SIGTERM and SIGKILL."""
    pod: Options = Field(default={})
    """More of the pod's spec; mappings merge, items of lists by their name or mountPath."""
    args: tuple[str, ...] = ()
    """Further arguments of every kubectl, such as --kubeconfig=FILE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What kubectl says of a pod.

    Attributes:
        name: Its own.
        job: Of the Job that made it.
        has_begun: Whether there is a log.
        is_evicted: Whether somebody takes its place from it.
        exit_code: None while it is not over.
        trouble: Why it waits or was ended; empty: nothing to tell.
    """

    name: str
    job: str
    has_begun: bool
    is_evicted: bool
    exit_code: int | None
    trouble: str

    @classmethod
    def of(cls, said: Mapping[str, Any], *, now: datetime) -> "Pod":
        """Return a pod; one that lost its place counts as killed, whatever it ended with."""
        meta, status = said["metadata"], said.get("status", {})
        states = {each["name"]: each["state"] for each in status.get("containerStatuses", ())}
        state = states.get(CONTAINER, {})
        conditions = {each["type"]: each for each in status.get("conditions", ())}
        target = conditions.get("DisruptionTarget", {}).get("status") == "True"
        gone_by, phase = meta.get("deletionTimestamp"), status.get("phase")
        is_evicted = target or gone_by is not None
        ended = state.get("terminated")
        code = None
        if ended is not None:
            code = LOST if is_evicted else code_of_shell(ended["exitCode"])
        elif phase == "Failed" or (gone_by and datetime.fromisoformat(gone_by) + _OVERDUE < now):
            code = LOST
        usual = ("ContainerCreating", "PodInitializing", "Completed", "Error")
        told: Sequence[Mapping[str, Any]] = (status, state.get("waiting", {}), ended or {})
        unusual = [each for each in told if each.get("reason", usual[0]) not in usual]
        scheduled, trouble = conditions.get("PodScheduled", {}), ""
        if unusual:
            trouble = f"{unusual[0]['reason']} {unusual[0].get('message', '')}".strip()
        elif scheduled.get("status") == "False":
            trouble = str(scheduled.get("message", ""))
        return cls(
            name=meta["name"],
            job=meta.get("labels", {}).get("job-name", ""),
            has_begun=ended is not None or "running" in state,
            is_evicted=is_evicted,
            exit_code=code,
            trouble=trouble[:300],
        )


def end_of(job: Mapping[str, Any] | None, pods: Sequence[Pod], *, count: int) -> int | None:
    """Return the exit code of a process of so many pods; None while it is not over.

    Args:
        job: None: there is none any more.
        pods: Of that Job.
        count: How many it has to have.
    """
    # One that had to go because another failed says less.
    failed = [pod for pod in sorted(pods, key=lambda pod: pod.is_evicted) if pod.exit_code]
    if failed:
        return failed[0].exit_code
    if sum(pod.exit_code == 0 for pod in pods) == count:
        return 0
    conditions: Sequence[Any] = (job or {}).get("status", {}).get("conditions", ())
    ends = [each for each in conditions if each["type"] in ("Complete", "Failed")]
    is_over = job is None or any(each["status"] == "True" for each in ends)
    # Pods that are not there any more were evicted.
    return LOST if is_over and all(pod.exit_code is not None for pod in pods) else None


def _probes(command: RoleCommand) -> Mapping[str, Any]:
    """Return probes of a process whose metrics all see; of several machines only one has them."""
    listen = [word for word in command.arguments if word.startswith("metrics.listen=0.0.0.0:")]
    port = int(listen[0].rpartition(":")[2]) if listen else 0
    if not port or command.machine_count > 1:
        return {}
    http = {"httpGet": {"path": "/metrics", "port": port}, "timeoutSeconds": 20}
    # One that computes answers late; it is ended when it has not answered for minutes.
    return {
        "readinessProbe": http,
        "startupProbe": {**http, "periodSeconds": 10, "failureThreshold": 180},
        "livenessProbe": {**http, "periodSeconds": 30, "failureThreshold": 10},
    }


class KubernetesProcess(WatchedProcess):
    """A Job."""

    def __init__(self, command: RoleCommand, executor: "KubernetesExecutor", job: str) -> None:
        super().__init__(command)
        self.job = job
        self._executor = executor
        self._logs: dict[str, asyncio.Task[None]] = {}
        self._noted = {""}
        self._live: set[str] = set()
        self._is_ending = False

    def send(self, number: signal.Signals) -> None:
        """Have Kubernetes end it: by SIGTERM, and after `grace_s` or with SIGKILL by force."""
        if self.exit_code is None:
            delete = self._executor.delete("job", self.job)
            self._executor.later(self.kill() if number is signal.SIGKILL else delete)

    async def kill(self) -> None:
        await self._executor.delete("job", self.job)
        await self._executor.delete("pods", "-l", f"job-name={self.job}", "--grace-period=1")

    def update(self, job: Mapping[str, Any] | None, pods: Sequence[Pod]) -> Sequence[str]:
        """Take what kubectl says; return what people should know of it."""
        self._live = {pod.name for pod in pods if pod.exit_code is None}
        for pod in pods:
            if pod.has_begun and pod.name not in self._logs:
                self._logs[pod.name] = asyncio.create_task(self._copy_log(pod.name))
        code = end_of(job, pods, count=self.command.machine_count)
        if code is not None and not self._is_ending:
            self._is_ending = True
            self._executor.later(self._end(code))
        news = {pod.trouble for pod in pods} - self._noted
        self._noted |= news
        return [f"{self.command.name}: {each}" for each in sorted(news)]

    async def _end(self, code: int) -> None:
        if self._logs:
            await asyncio.wait(self._logs.values(), timeout=_LOG_S)
        self.close()
        self.has_ended(code)

    async def _copy_log(self, pod: str) -> None:
        """Append the log of a pod, again from where a connection broke, until it is over."""
        code, broke_s, is_last, log = None, None, False, self.command.log
        clock = self._executor.clock
        log.touch()
        while not is_last and (code != 0 or pod in self._live):
            is_last, read_nbytes = pod not in self._live, log.stat().st_size
            # A span: the clock of the pod's machine may be another one.
            since = () if broke_s is None else (f"--since={ceil(clock.monotonic() - broke_s)}s",)
            code = await self._executor.append_log(pod, log, *since)
            # A connection that could not be made has read nothing.
            if log.stat().st_size > read_nbytes:
                broke_s = clock.monotonic()
            if pod in self._live:
                await asyncio.sleep(self._executor.poll_s)

    def close(self) -> None:
        """Read no log any more."""
        for task in self._logs.values():
            task.cancel()


class KubernetesExecutor(PollingExecutor[KubernetesOptions, KubernetesProcess]):
    """Makes Jobs."""

    options_type = KubernetesOptions
    poll_s = 2.0
    clock: Clock = SystemClock()

    def __init__(self, place: RunPlace, options: KubernetesOptions) -> None:
        super().__init__(place, options)
        # Monotonic, by the name of a pod.
        self._deleted_s: dict[str, float] = {}

    def require(self) -> None:
        require_commands(
            {"kubectl": "install it by https://kubernetes.io/docs/tasks/tools/#kubectl"}
        )
        if self.options.claim is None and "volumes" not in self.options.pod:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "executor.options.claim: pods have to see the folder of the run; name a "
                "PersistentVolumeClaim that is mounted here, or give pod.volumes",
            )
        root = self.place.run_dir.root.absolute()
        if not root.is_relative_to(self._mount):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"executor.options.mount: the folder of the run, {root}, is not in {self._mount}; "
                "choose another by --runs",
            )

    @property
    def _mount(self) -> Path:
        return self.options.mount or self.place.run_dir.root.absolute().parent

    def job(self, command: RoleCommand, name: str) -> Mapping[str, Any]:
        """Return the Job of a process, whose pods mount a Secret of the same name."""
        said, count = self.options, command.machine_count
        gpus = {said.gpu_resource: str(command.gpus)} if command.gpus else {}
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": said.image,
            "command": ["/bin/sh", "-c", self.script(command)],
            "resources": {"requests": {"cpu": str(command.cpus)}, "limits": gpus},
        }
        container |= _probes(command)
        secrets = {"name": "secrets", "secret": {"secretName": name, "defaultMode": 0o400}}
        pod: dict[str, Any] = {"containers": [container], "volumes": [secrets]}
        pod["terminationGracePeriodSeconds"] = said.grace_s
        pod["automountServiceAccountToken"] = said.service_account is not None
        if said.service_account is not None:
            pod["serviceAccountName"] = said.service_account
        if said.claim is not None:
            claim = {"name": "runs", "persistentVolumeClaim": {"claimName": said.claim}}
            pod["volumes"].append(claim)
            container["volumeMounts"] = [{"name": "runs", "mountPath": str(self._mount)}]
        spec: dict[str, Any] = {"parallelism": count, "completions": count}
        if count > 1:
            spec["completionMode"] = "Indexed"
        labels = {"labels": self._labels(command)}
        spec["template"] = {"metadata": labels, "spec": merged(pod, dict(said.pod))}
        folder = str(self.place.run_dir.root.absolute())
        meta = {"name": name, **labels, "annotations": {"astraflow/folder": folder}}
        return merged(yaml.safe_load(_JOB), {"metadata": meta, "spec": spec})

    def secrets_path(self, command: RoleCommand) -> Path:  # noqa: ARG002
        return _SECRETS / "env"

    def secret(self, command: RoleCommand, name: str, text: str) -> Mapping[str, Any]:
        """Return the Secret of a process, with what its shell reads."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "labels": self._labels(command)},
            "stringData": {"env": text},
        }

    def _labels(self, command: RoleCommand) -> Mapping[str, str]:
        return {
            "app.kubernetes.io/name": "astraflow",
            _RUN: self.run_id,
            "astraflow/role": command.arguments[0],
            "astraflow/process": slug(command.name),
        }

    def preview(self, command: RoleCommand) -> str:
        name = f"{slug(command.name)}-{self.run_id}"
        shown = (self.secret(command, name, "# not shown\n"), self.job(command, name))
        return f"# {shlex.join(self._kubectl('create', '-f', '-'))}\n{as_yaml(*shown)}"

    def _kubectl(self, *words: str) -> Sequence[str]:
        said = self.options
        where = {"--context": said.context, "--namespace": said.namespace}
        return (
            "kubectl",
            *(f"{key}={value}" for key, value in where.items() if value is not None),
            *said.args,
            *words,
        )

    async def start(self, command: RoleCommand) -> KubernetesProcess:
        self.keep_run_id()
        command.log.parent.mkdir(parents=True, exist_ok=True)
        name = f"{slug(command.name)}-{self.run_id}-{uuid4().hex[:6]}"
        create = self._kubectl("create", "-f", "-", "-o", "jsonpath={.metadata.uid}")
        uid = await call(*create, stdin=json.dumps(self.job(command, name)))
        secret = dict(self.secret(command, name, self.secrets(command)))
        # It goes when the Job does, whoever deletes that.
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
        secret["metadata"] = {**secret["metadata"], "ownerReferences": [owner]}
        try:
            await call(*create, stdin=json.dumps(secret))
        except AstraflowError:
            await self.delete("job", name)
            raise
        process = KubernetesProcess(command, self, name)
        self.follow(name, process)
        return process

    async def poll(self) -> None:
        # The answer says nothing of what is made meanwhile.
        known = dict(self.live)
        jobs, pods = await self._state()
        for name, process in known.items():
            for note in process.update(jobs.get(name), [pod for pod in pods if pod.job == name]):
                self.place.note(note)

    async def _state(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[Pod]]:
        """Return the Jobs of the run by name, and their pods.

        Raises:
            AstraflowError: NOT_READY when the API server does not answer, or kubectl says what
                cannot be read.
        """
        said = await call(*self._kubectl("get", "jobs,pods", "-l", self._mark, "-o", "json"))
        try:
            items = json.loads(said)["items"]
            jobs = {each["metadata"]["name"]: each for each in items if each["kind"] == "Job"}
            return jobs, self._pods([each for each in items if each["kind"] == "Pod"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise AstraflowError(
                Reason.NOT_READY, f"kubectl get -o json said what cannot be read: {error!r}"
            ) from error

    def _pods(self, items: Sequence[Mapping[str, Any]]) -> Sequence[Pod]:
        """Return pods; of one that is being deleted the time passes here, from when it was seen.

        The clock of the cluster may be another one than this machine's.
        """
        now_s, before, pods = self.clock.monotonic(), self._deleted_s, list[Pod]()
        self._deleted_s = {}
        for each in items:
            meta, now = each["metadata"], datetime.now(UTC)
            if gone_by := meta.get("deletionTimestamp"):
                since_s = self._deleted_s[meta["name"]] = before.get(meta["name"], now_s)
                grace = timedelta(seconds=meta.get("deletionGracePeriodSeconds", 0))
                passed = timedelta(seconds=now_s - since_s)
                now = datetime.fromisoformat(gone_by) - grace + passed
            pods.append(Pod.of(each, now=now))
        return pods

    @property
    def _mark(self) -> str:
        return f"{_RUN}={self.run_id}"

    async def append_log(self, pod: str, log: Path, *words: str) -> int:
        """Append what a pod says to a log for as long as it says it; return kubectl's exit code."""
        argv = self._kubectl("logs", "--follow", f"--container={CONTAINER}", *words, pod)
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=DEVNULL, stdout=file, stderr=DEVNULL, start_new_session=True
            )
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()

    async def delete(self, *words: str) -> None:
        """Delete what is there of it; pods have their time to end."""
        await attempt(*self._deletion(*words))

    def _deletion(self, *words: str) -> Sequence[str]:
        return self._kubectl("delete", *words, "--wait=false", "--ignore-not-found")

    async def sweep(self) -> None:
        if not self.has_run_id:
            return
        jobs, pods = await self._state()
        over = {pod.job for pod in pods if pod.exit_code is not None}
        left = sorted(jobs.keys() - self.live.keys() - over)
        if left:
            self.place.note(f"Jobs that were left of this run are deleted: {', '.join(left)}")
        await call(*self._deletion("jobs,secrets", "-l", self._mark))

    async def close(self) -> None:
        await super().close()
        for process in self.live.values():
            process.close()
