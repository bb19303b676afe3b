//! A toy RaaS: pulls and verifies every version, and samples bytes at random all the same.
//!
//!     raas --hub HOST:PORT --token TOKEN [--policy solver] [--workflow single_turn]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use astraflow_peers::common::{Contract, DirectiveKind, Dtype, Failure, RaasLoad, Reason, Session};
use astraflow_peers::common::{SessionResume, Tensor};
use astraflow_peers::dataflow::keep_alive_request::Load;
use astraflow_peers::dataflow::stream_tasks_request::Request;
use astraflow_peers::dataflow::stream_tasks_response::Event;
use astraflow_peers::dataflow::{rollout_item::Item, *};
use astraflow_peers::grpc::{Sink, Status};
use astraflow_peers::member::{asking, Member, Role};
use astraflow_peers::options::option;
use astraflow_peers::replica::{Replica, Source, Version};
use astraflow_peers::rollout::{FinishReason, Outcome, RegisteredCode, Rollout, RolloutTask, TaskResult};
use astraflow_peers::rollout::{Trajectory, VersionSpan};
use astraflow_peers::weights_v1::*;
use tokio::sync::Notify;
use tokio::time::sleep;

const CAPACITY: i32 = 8;
const VERSION_SERVICE: &str = "/astraflow.weights.v1.VersionService/";

/// What waits to be sent, and what was sent and not acknowledged, in order.
struct Outbox<T> {
    // And how many of them are on their way over the present stream.
    items: Mutex<(Vec<T>, usize)>,
    changed: Notify,
}

impl<T: Clone> Outbox<T> {
    fn new() -> Self {
        Outbox { items: Mutex::new((vec![], 0)), changed: Notify::new() }
    }

    fn put(&self, item: T) {
        self.items.lock().unwrap().0.push(item);
        self.changed.notify_one();
    }

    /// Has everything sent again, on a new stream.
    fn rewind(&self) {
        self.items.lock().unwrap().1 = 0;
    }

    async fn next(&self) -> T {
        loop {
            {
                let mut items = self.items.lock().unwrap();
                if let Some(item) = items.0.get(items.1).cloned() {
                    items.1 += 1;
                    return item;
                }
            }
            self.changed.notified().await;
        }
    }

    /// Forgets the oldest that were sent: no more tasks than these are out at once, so that they arrived.
    fn keep(&self, count: usize) {
        let mut items = self.items.lock().unwrap();
        let extra = items.0.len().saturating_sub(count).min(items.1);
        items.0.drain(..extra);
        items.1 -= extra;
    }

    /// Forgets what the claim is true of.
    fn forget(&self, is_over: impl Fn(&T) -> bool) {
        let mut items = self.items.lock().unwrap();
        items.1 -= items.0.iter().take(items.1).filter(|item| is_over(item)).count();
        items.0.retain(|item| !is_over(item));
    }
}

struct Raas {
    policy_id: String,
    workflow: String,
    replica: Replica,
    tasks: Mutex<HashMap<String, RolloutTask>>,
    outbox: Outbox<Item>,
    nacks: Outbox<TaskNack>,
    rollout_count: Mutex<u64>,
}

type Me = Arc<Member<Raas>>;

impl Role for Raas {
    const JOIN: &'static str = "/astraflow.dataflow.v1.RaasService/JoinPool";
    type Request = JoinPoolRequest;
    type Answer = JoinPoolResponse;

    fn describe(&self, resume: Option<SessionResume>) -> JoinPoolRequest {
        let code = |name: &str| RegisteredCode { name: name.into(), ..Default::default() };
        let policy = ServedPolicy {
            policy_id: self.policy_id.clone(),
            version: self.replica.version().map(|held| held.number),
            max_context_token_count: 4096,
            ..Default::default()
        };
        let held_task_ids = self.tasks.lock().unwrap().keys().cloned().collect();
        JoinPoolRequest {
            name: format!("toy-{}", std::process::id()),
            contract: Some(Contract {
                contract_version: 1,
                software: "astraflow-rust".into(),
                ..Default::default()
            }),
            resume: resume.map(|resume| SessionResume { held_task_ids, ..resume }),
            capacity: CAPACITY,
            policies: vec![policy],
            codes: vec![code(&self.workflow), code("exact")],
            ..Default::default()
        }
    }

    fn admitted(&self, answer: JoinPoolResponse) -> Session {
        answer.session.unwrap_or_default()
    }

    fn load(&self) -> KeepAliveRequest {
        let inflight_count = self.tasks.lock().unwrap().len() as i32;
        let load = RaasLoad { inflight_count, capacity: CAPACITY, ..Default::default() };
        KeepAliveRequest { load: Some(Load::Raas(load)) }
    }
}

/// Takes every version that is newer than what is held.
async fn follow_versions(me: &Me) -> Result<(), Status> {
    let request = WatchVersionsRequest { policy_id: me.role.policy_id.clone(), after_version: None };
    let path = "/astraflow.weights.v1.VersionService/WatchVersions";
    let mut versions = me.stream::<_, WatchVersionsResponse>(path, asking(request));
    while let Some(event) = versions.next().await? {
        let info = event.version.unwrap_or_default();
        if me.role.replica.version().map_or(true, |held| held.number < info.version) {
            follow(me, &info).await?;
        }
    }
    Ok(())
}

/// Asks each source for patches from what is held, then for everything anew.
async fn follow(me: &Me, info: &VersionInfo) -> Result<(), Status> {
    let mut failure = None;
    for source in info.sources.iter().filter(|source| !source.endpoint.is_empty()) {
        for anew in [false, true] {
            let request = ListVersionsRequest { policy_id: me.role.policy_id.clone() };
            let path = format!("{VERSION_SERVICE}ListVersions");
            let listed: ListVersionsResponse = me.call(&path, &request).await?;
            let announced: Vec<_> = listed.versions.into_iter().flat_map(|each| each.patches).collect();
            let from = Source { endpoint: &source.endpoint, token: me.transfer_token() };
            match me.role.replica.pull(info, &from, &announced, anew).await {
                Ok(()) => return report(me, info.version, VersionState::Live, None).await,
                Err(status) => failure = Some(status),
            }
        }
    }
    let failed = match failure {
        Some(status) => status,
        None => return Ok(()),
    };
    let reason =
        if failed.reason == "DIGEST_MISMATCH" { Reason::DigestMismatch } else { Reason::SourceUnreachable };
    let failure =
        Failure { reason: reason.into(), message: failed.to_string(), retryable: true, ..Default::default() };
    report(me, info.version, VersionState::Failed, Some(failure)).await
}

async fn report(me: &Me, version: i64, state: VersionState, failure: Option<Failure>) -> Result<(), Status> {
    let policy_id = me.role.policy_id.clone();
    let request =
        ReportVersionRequest { policy_id, version, state: state.into(), failure, ..Default::default() };
    let path = format!("{VERSION_SERVICE}ReportVersion");
    me.call::<_, ReportVersionResponse>(&path, &request).await.map(|_| ())
}

/// Opens the stream with the credit, and gives back what cannot be done.
fn steer(me: Me) -> impl Fn(Sink<StreamTasksRequest>) -> tokio::task::JoinHandle<()> {
    move |mut sink| {
        let me = me.clone();
        // On a new stream all is said again: of a task that is not held it changes nothing.
        me.role.nacks.rewind();
        tokio::spawn(async move {
            let credit = TaskCredit { max_outstanding: CAPACITY, ..Default::default() };
            let mut request = Request::Open(TaskOpen { credit: Some(credit) });
            while sink.send(&StreamTasksRequest { request: Some(request) }).await.is_ok() {
                request = Request::Nack(me.role.nacks.next().await);
            }
        })
    }
}

/// Works on what the run sends, until it asks the node to leave: at once, or when all is closed.
async fn take_tasks(me: &Me) -> Result<(), Status> {
    let path = "/astraflow.dataflow.v1.RaasService/StreamTasks";
    let mut events = me.stream::<_, StreamTasksResponse>(path, steer(me.clone())).reconciling();
    while let Some(event) = events.next().await? {
        match event.event {
            Some(Event::Task(task)) => {
                me.role.tasks.lock().unwrap().insert(task.task_id.clone(), task.clone());
                let me = me.clone();
                tokio::spawn(async move { work(&me, task).await });
            }
            Some(Event::Directive(told)) if told.kind() == DirectiveKind::Stop => return Ok(()),
            Some(Event::Directive(told)) if told.kind() == DirectiveKind::Drain => break,
            _ => {}
        }
    }
    while !me.role.tasks.lock().unwrap().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Samples all rollouts of a task; the result comes last.
async fn work(me: &Me, task: RolloutTask) {
    let range = task.versions.get(&me.role.policy_id).cloned().unwrap_or_default();
    let version = me.role.replica.wait_for(range.min.unwrap_or(0)).await;
    let is_late = task.deadline.clone().map_or(false, |deadline| {
        SystemTime::try_from(deadline).map_or(false, |deadline| deadline < SystemTime::now())
    });
    if is_late {
        return give_back(me, &task, Reason::TaskExpired);
    }
    if range.max.map_or(false, |max| version.number > max) {
        return give_back(me, &task, Reason::VersionNotServed);
    }
    for index in &task.sample_indexes {
        me.role.outbox.put(Item::Rollout(rollout(me, &task, *index, &version)));
    }
    let rollout_count = task.sample_indexes.len() as i32;
    let result = TaskResult { task_id: task.task_id.clone(), rollout_count, failures: vec![] };
    me.role.outbox.put(Item::Result(result));
}

fn give_back(me: &Me, task: &RolloutTask, reason: Reason) {
    let failure = Failure { reason: reason.into(), ..Default::default() };
    me.role.nacks.put(TaskNack { task_id: task.task_id.clone(), failure: Some(failure) });
    me.role.nacks.keep(CAPACITY as usize);
    me.role.tasks.lock().unwrap().remove(&task.task_id);
}

fn rollout(me: &Me, task: &RolloutTask, sample_index: i32, version: &Version) -> Rollout {
    let number = {
        let mut count = me.role.rollout_count.lock().unwrap();
        *count += 1;
        *count
    };
    let rollout_id = format!("rollout-{}-{number}", std::process::id());
    let mut noise = Noise(u64::from(std::process::id()) << 32 | number);
    let said = task.prompt.clone().unwrap_or_default().data_json;
    let sampling = task.sampling.get(&me.role.policy_id).cloned().unwrap_or_default();
    let count = sampling.max_new_tokens.max(1) as usize;
    let prompt = said.iter().map(|byte| i32::from(*byte));
    let tokens: Vec<i32> = prompt.chain((0..count).map(|_| (noise.next() % 256) as i32)).collect();
    let sampled = |at: usize| at >= said.len();
    let logprobs = (0..tokens.len()).map(|at| if sampled(at) { -(256f32.ln()) } else { 0.0 });
    let tensor = |dtype: Dtype, data: Vec<u8>| {
        Some(Tensor { dtype: dtype.into(), shape: vec![tokens.len() as i64], data })
    };
    let trajectory = Trajectory {
        trajectory_id: format!("{rollout_id}-0"),
        policy_id: me.role.policy_id.clone(),
        tokens: tensor(Dtype::I32, tokens.iter().flat_map(|token| token.to_le_bytes()).collect()),
        sampled_mask: tensor(Dtype::Bool, (0..tokens.len()).map(|at| u8::from(sampled(at))).collect()),
        logprobs: tensor(Dtype::F32, logprobs.flat_map(|each| each.to_le_bytes()).collect()),
        version_spans: vec![VersionSpan {
            version: version.number,
            length: count as i32,
            ..Default::default()
        }],
        sampling: Some(sampling),
        finish_reason: FinishReason::Length.into(),
        engine: "random".into(),
        ..Default::default()
    };
    Rollout {
        rollout_id,
        task_id: task.task_id.clone(),
        group_id: task.group_id.clone(),
        sample_index,
        outcome: Outcome::Scored.into(),
        reward: Some((noise.next() % 1000) as f64 / 1000.0),
        trajectories: vec![trajectory],
        policy_versions: HashMap::from([(me.role.policy_id.clone(), version.number)]),
        ..Default::default()
    }
}

/// splitmix64.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58476d1ce4e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d049bb133111eb);
        x ^ x >> 31
    }
}

/// Sends what is in the outbox; what was not acknowledged comes first on a new stream.
async fn deliver(me: &Me) -> Result<(), Status> {
    let path = "/astraflow.dataflow.v1.RaasService/StreamRollouts";
    let sender = me.clone();
    let start = move |mut sink: Sink<StreamRolloutsRequest>| {
        let me = sender.clone();
        me.role.outbox.rewind();
        tokio::spawn(async move {
            loop {
                let item = Some(me.role.outbox.next().await);
                let request = StreamRolloutsRequest { items: vec![RolloutItem { item }] };
                if sink.send(&request).await.is_err() {
                    return;
                }
            }
        })
    };
    let mut answers = me.stream::<_, StreamRolloutsResponse>(path, start);
    while let Some(answer) = answers.next().await? {
        for ack in answer.acks {
            me.role.outbox.forget(|item| match item {
                Item::Rollout(rollout) => rollout.rollout_id == ack.item_id,
                Item::Result(result) => result.task_id == ack.item_id,
            });
            me.role.tasks.lock().unwrap().remove(&ack.item_id);
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let raas = Raas {
        policy_id: option("policy", "solver"),
        workflow: option("workflow", "single_turn"),
        replica: Replica::default(),
        tasks: Mutex::default(),
        outbox: Outbox::new(),
        nacks: Outbox::new(),
        rollout_count: Mutex::default(),
    };
    let me = Member::join(&option("hub", ""), &option("token", ""), raas).await?;
    tokio::select! {
        Err(status) = follow_versions(&me) => return Err(status.into()),
        Err(status) = deliver(&me) => return Err(status.into()),
        done = take_tasks(&me) => done?,
    }
    me.leave("as asked").await?;
    let version = me.role.replica.version().map_or(-1, |held| held.number);
    println!("{{\"rollouts\": {}, \"version\": {version}}}", me.role.rollout_count.lock().unwrap());
    Ok(())
}
