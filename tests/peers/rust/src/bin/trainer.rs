//! A toy trainer: takes batches and publishes versions; version n is the tensor w, f32[100], of n.
//!
//!     trainer --hub HOST:PORT --token TOKEN [--policy solver]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use astraflow_peers::common::{Contract, DirectiveKind, Dtype, Session, SessionResume, TrainerLoad};
use astraflow_peers::dataflow::keep_alive_request::Load;
use astraflow_peers::dataflow::stream_batches_response::Event;
use astraflow_peers::dataflow::*;
use astraflow_peers::grpc::{self, from_binary, reply, Status};
use astraflow_peers::member::{asking, Member, Role};
use astraflow_peers::options::option;
use astraflow_peers::rollout::{BatchHeader, BatchPart};
use astraflow_peers::weights::{layout_digest, state_digest, whole};
use astraflow_peers::weights_v1::pull_response::Item;
use astraflow_peers::weights_v1::*;
use bytes::Bytes;
use http::HeaderMap;
use prost::Message;
use tokio::net::TcpListener;

const ELEMENT_COUNT: i64 = 100;
/// How many versions can be pulled.
const KEPT_COUNT: i64 = 8;
const TRAINER_SERVICE: &str = "/astraflow.dataflow.v1.TrainerService/";

#[derive(Default)]
struct State {
    next_version: i64,
    step: i64,
    batch: Option<BatchHeader>,
    rewards: Vec<f32>,
}

/// What other members see of it.
struct Trainer {
    policy_id: String,
    endpoint: String,
    state: Arc<Mutex<State>>,
    source: Arc<Mutex<Source>>,
}

impl Role for Trainer {
    const JOIN: &'static str = "/astraflow.dataflow.v1.TrainerService/RegisterTrainer";
    type Request = RegisterTrainerRequest;
    type Answer = RegisterTrainerResponse;

    fn describe(&self, resume: Option<SessionResume>) -> RegisterTrainerRequest {
        let state = self.state.lock().unwrap();
        let held = state.batch.iter().map(|batch| batch.batch_id.clone()).collect();
        RegisterTrainerRequest {
            policy_id: self.policy_id.clone(),
            name: "toy-trainer".into(),
            contract: Some(Contract {
                contract_version: 1,
                software: "astraflow-rust".into(),
                ..Default::default()
            }),
            resume: resume.map(|resume| SessionResume { held_batch_ids: held, ..resume }),
            groups_per_batch: 2,
            last_step: state.step,
            version: if state.next_version > 0 { Some(state.next_version - 1) } else { None },
            weight_endpoints: vec![WeightEndpoint { endpoint: self.endpoint.clone(), ..Default::default() }],
            ..Default::default()
        }
    }

    fn admitted(&self, answer: RegisterTrainerResponse) -> Session {
        self.state.lock().unwrap().next_version = answer.next_version;
        answer.session.unwrap_or_default()
    }

    fn entrusted(&self, transfer_token: &[u8]) {
        self.source.lock().unwrap().secret = transfer_token.into();
    }

    fn load(&self) -> KeepAliveRequest {
        let state = self.state.lock().unwrap();
        let held_batch_count = i32::from(state.batch.is_some());
        let load = TrainerLoad { step: state.step, held_batch_count, ..Default::default() };
        KeepAliveRequest { load: Some(Load::Trainer(load)) }
    }
}

/// The newest versions, each as a patch from nothing.
#[derive(Default)]
struct Source {
    secret: Vec<u8>,
    layout: Layout,
    versions: HashMap<i64, (Chunk, PatchIndex)>,
}

impl Source {
    fn answer(&self, path: &str, headers: &HeaderMap, request: Bytes) -> Result<Vec<Bytes>, Status> {
        let given = from_binary(headers.get("astraflow-transfer-bin"));
        if self.secret.is_empty() || given != self.secret {
            return Err(Status::new(grpc::UNAUTHENTICATED, "TOKEN_INVALID", "join the run"));
        }
        let broken = |error| Status::new(grpc::INVALID_ARGUMENT, "INVALID_FIELD", error);
        match path {
            "/astraflow.weights.v1.TransferService/Pull" => {
                self.pull(PullRequest::decode(request).map_err(broken)?.spec.unwrap_or_default())
            }
            "/astraflow.weights.v1.TransferService/GetLayout" => {
                let wanted = GetLayoutRequest::decode(request).map_err(broken)?.layout_digest;
                if wanted != layout_digest(&self.layout) {
                    return Err(Status::new(grpc::NOT_FOUND, "LAYOUT_UNKNOWN", "not held here"));
                }
                Ok(vec![reply(&GetLayoutResponse { layout: Some(self.layout.clone()) })])
            }
            _ => Err(Status::new(grpc::UNIMPLEMENTED, "CAPABILITY_MISSING", path)),
        }
    }

    /// The plan, then what of it the puller lacks.
    fn pull(&self, spec: TransferSpec) -> Result<Vec<Bytes>, Status> {
        let unknown = || Status::new(grpc::NOT_FOUND, "VERSION_UNKNOWN", "not held here");
        let (chunk, index) = self.versions.get(&spec.version).ok_or_else(unknown)?;
        let root = index.patch.clone().unwrap_or_default().root_digest;
        let is_held = spec.have_chunks.iter().any(|set| set.root_digest == root);
        let plan = TransferPlan {
            patches: vec![index.clone()],
            chunk_count: i64::from(!is_held),
            payload_nbytes: if is_held { 0 } else { chunk.payload.len() as i64 },
            ..Default::default()
        };
        let mut replies = vec![reply(&PullResponse { item: Some(Item::Plan(plan)) })];
        if !is_held {
            replies.push(reply(&PullResponse { item: Some(Item::Chunk(chunk.clone())) }));
        }
        Ok(replies)
    }
}

/// Makes the next version, serves it, then tells of it.
async fn publish(member: &Member<Trainer>) -> Result<(), Status> {
    let trainer = &member.role;
    let (version, step) = {
        let state = trainer.state.lock().unwrap();
        (state.next_version, state.step)
    };
    let weights = (version as f32).to_le_bytes().repeat(ELEMENT_COUNT as usize);
    let info = {
        let mut source = trainer.source.lock().unwrap();
        let content_digest = state_digest(&source.layout, &weights)?;
        let (chunk, index) = whole(version, Dtype::F32, weights);
        let patches = index.patch.clone().into_iter().collect();
        source.versions.insert(version, (chunk, index));
        source.versions.remove(&(version - KEPT_COUNT));
        VersionInfo {
            policy_id: trainer.policy_id.clone(),
            version,
            layout_digest: layout_digest(&source.layout),
            content_digest,
            step,
            patches,
            ..Default::default()
        }
    };
    let request = PublishVersionRequest { version: Some(info), ..Default::default() };
    let path = format!("{TRAINER_SERVICE}PublishVersion");
    let answer: PublishVersionResponse = member.call(&path, &request).await?;
    trainer.state.lock().unwrap().next_version = answer.next_version;
    Ok(())
}

/// Would change the weights here; it counts.
async fn learn(member: &Member<Trainer>) -> Result<(), Status> {
    let request = {
        let mut state = member.role.state.lock().unwrap();
        state.step += 1;
        let mean = state.rewards.iter().sum::<f32>() / state.rewards.len().max(1) as f32;
        AckBatchRequest {
            batch_id: state.batch.clone().unwrap_or_default().batch_id,
            outcome: BatchOutcome::Consumed.into(),
            step: state.step,
            metrics: HashMap::from([("toy/reward_mean".into(), f64::from(mean))]),
            ..Default::default()
        }
    };
    publish(member).await?;
    let path = format!("{TRAINER_SERVICE}AckBatch");
    member.call::<_, AckBatchResponse>(&path, &request).await?;
    member.role.state.lock().unwrap().batch = None;
    Ok(())
}

/// Keeps a part; says whether it was the last one.
fn take(state: &mut State, part: &BatchPart) -> bool {
    let rewards = part.columns.get("rewards").and_then(|column| column.tensor.as_ref());
    let bytes = rewards.map(|tensor| tensor.data.as_slice()).unwrap_or_default();
    let floats =
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    state.rewards.extend(floats);
    state.batch.as_ref().map_or(false, |batch| part.index == batch.part_count - 1)
}

/// Takes batches until the data ends or the run asks it to leave.
async fn train(member: &Arc<Member<Trainer>>) -> Result<(), Status> {
    publish(member).await?;
    let request = StreamBatchesRequest { world_size: 1, max_outstanding: 1, ..Default::default() };
    let mut batches = member.stream::<_, StreamBatchesResponse>(
        "/astraflow.dataflow.v1.TrainerService/StreamBatches",
        asking(request),
    );
    while let Some(event) = batches.next().await? {
        let is_whole = match event.event {
            Some(Event::Header(header)) => {
                let mut state = member.role.state.lock().unwrap();
                let is_empty = header.part_count == 0;
                state.batch = Some(header);
                state.rewards.clear();
                is_empty
            }
            Some(Event::Part(part)) => take(&mut member.role.state.lock().unwrap(), &part),
            Some(Event::Publish(_)) => {
                publish(member).await?;
                false
            }
            Some(Event::Directive(told)) if told.kind() != DirectiveKind::Continue => break,
            Some(Event::EndOfData(_)) => break,
            _ => false,
        };
        if is_whole {
            learn(member).await?;
        }
    }
    member.leave("no data is left").await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let nbytes = 4 * ELEMENT_COUNT;
    let tensor = TensorSpec {
        name: "w".into(),
        dtype: Dtype::F32.into(),
        shape: vec![ELEMENT_COUNT],
        offset: 0,
        nbytes,
    };
    let layout = Layout { tensors: vec![tensor], nbytes, adapter: None };
    let source = Arc::new(Mutex::new(Source { layout, ..Default::default() }));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = listener.local_addr()?.to_string();
    let served = source.clone();
    tokio::spawn(grpc::serve(
        listener,
        Arc::new(move |path: &str, headers: &HeaderMap, request| {
            served.lock().unwrap().answer(path, headers, request)
        }),
    ));
    let state = Arc::new(Mutex::new(State::default()));
    let trainer = Trainer { policy_id: option("policy", "solver"), endpoint, state: state.clone(), source };
    let member = Member::join(&option("hub", ""), &option("token", ""), trainer).await?;
    train(&member).await?;
    let state = state.lock().unwrap();
    println!("{{\"step\": {}, \"version\": {}}}", state.step, state.next_version - 1);
    Ok(())
}
