//! What every member of a run does: join, keep its session alive, make calls again that were cut.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use prost::Message;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::common::{Session, SessionResume};
use crate::dataflow::{EndSessionRequest, EndSessionResponse, KeepAliveRequest, KeepAliveResponse};
use crate::grpc::{binary, Answers, Channel, Metadata, Sink, Status};

const PATIENCE: Duration = Duration::from_secs(10);
const DEADLINE: Duration = Duration::from_secs(5);
const SESSION_SERVICE: &str = "/astraflow.dataflow.v1.SessionService/";
// CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, ABORTED, INTERNAL, UNAVAILABLE.
const CUT: [i32; 6] = [1, 2, 4, 10, 13, 14];

/// What differs between a trainer and a RaaS.
pub trait Role: Send + Sync + 'static {
    /// The call that joins.
    const JOIN: &'static str;
    type Request: Message;
    type Answer: Message + Default;

    /// Says who joins; what is still held is filled in.
    fn describe(&self, resume: Option<SessionResume>) -> Self::Request;
    /// Takes the answer.
    fn admitted(&self, answer: Self::Answer) -> Session;
    /// Takes the secret of every TransferService of the run, whenever it is another one.
    fn entrusted(&self, _transfer_token: &[u8]) {}
    /// How busy it is.
    fn load(&self) -> KeepAliveRequest;
}

/// One member of a run.
pub struct Member<R> {
    pub role: R,
    hub: Channel,
    // A connection of its own: bulk must not delay a KeepAlive.
    pulse: Channel,
    token: String,
    session: Mutex<Session>,
    joining: tokio::sync::Mutex<()>,
}

impl<R: Role> Member<R> {
    /// Joins, and keeps the session alive.
    pub async fn join(hub: &str, token: &str, role: R) -> Result<Arc<Self>, Status> {
        let member = Arc::new(Member {
            role,
            hub: Channel::new(hub),
            pulse: Channel::new(hub),
            token: token.into(),
            session: Mutex::default(),
            joining: tokio::sync::Mutex::default(),
        });
        member.enter(&[]).await?;
        let kept = member.clone();
        tokio::spawn(async move { kept.keep_alive().await });
        Ok(member)
    }

    /// The secret of every TransferService of the run; it may change.
    pub fn transfer_token(&self) -> Vec<u8> {
        self.session.lock().unwrap().transfer_token.clone()
    }

    /// Makes a call; it is repeated while the run cannot be reached, and after joining anew when the
    /// session ended.
    pub async fn call<Q: Message, A: Message + Default>(&self, path: &str, request: &Q) -> Result<A, Status> {
        let end = Instant::now() + PATIENCE;
        loop {
            let token = self.present();
            let metadata = vec![session_header(&token)];
            match self.hub.unary(path, metadata, request, DEADLINE).await {
                Ok(answer) => return Ok(answer),
                Err(status) => self.mend(status, end, &token).await?,
            }
        }
    }

    /// Returns a stream that is opened again when it is cut; `start` is given where to send each time.
    pub fn stream<Q, A>(
        self: &Arc<Self>,
        path: &'static str,
        start: impl Fn(Sink<Q>) -> JoinHandle<()> + Send + 'static,
    ) -> Stream<R, Q, A> {
        let now = Instant::now();
        Stream {
            member: self.clone(),
            path,
            start: Box::new(start),
            open: None,
            reconciles: false,
            began: now,
            end: now + PATIENCE,
        }
    }

    /// Ends the session: what the member holds returns to the run.
    pub async fn leave(&self, message: &str) -> Result<(), Status> {
        let request = EndSessionRequest { message: message.into() };
        let path = format!("{SESSION_SERVICE}EndSession");
        self.call::<_, EndSessionResponse>(&path, &request).await.map(|_| ())
    }

    /// Joins unless somebody else did since: joining twice would end what that one opened.
    async fn enter(&self, ended: &[u8]) -> Result<(), Status> {
        let _alone = self.joining.lock().await;
        if self.present() != ended {
            return Ok(());
        }
        let resume = SessionResume { resume_token: ended.into(), incarnation: 1, ..Default::default() };
        let request = self.role.describe(if ended.is_empty() { None } else { Some(resume) });
        let metadata = vec![("authorization", format!("Bearer {}", self.token))];
        let answer = self.hub.unary(R::JOIN, metadata, &request, DEADLINE).await?;
        let session = self.role.admitted(answer);
        self.role.entrusted(&session.transfer_token);
        *self.session.lock().unwrap() = session;
        Ok(())
    }

    async fn keep_alive(&self) {
        let path = format!("{SESSION_SERVICE}KeepAlive");
        loop {
            let token = self.present();
            let (metadata, load) = (vec![session_header(&token)], self.role.load());
            let told: Result<KeepAliveResponse, _> = self.pulse.unary(&path, metadata, &load, DEADLINE).await;
            // Why it failed the next one finds out, or another call.
            if let Ok(answer) = told {
                let mut session = self.session.lock().unwrap();
                if !answer.transfer_token.is_empty() && session.token == token {
                    self.role.entrusted(&answer.transfer_token);
                    session.transfer_token = answer.transfer_token;
                }
            }
            let interval = self.session.lock().unwrap().keep_alive_interval.clone().unwrap_or_default();
            sleep(Duration::new(interval.seconds as u64, interval.nanos as u32)).await;
        }
    }

    /// Returns when the call that failed can be made again.
    async fn mend(&self, status: Status, end: Instant, token: &[u8]) -> Result<(), Status> {
        let is_cut = status.reason.is_empty() && CUT.contains(&status.code);
        if Instant::now() > end {
            return Err(status);
        }
        if status.reason == "SESSION_ENDED" {
            return self.enter(token).await;
        }
        if status.reason != "NOT_READY" && !is_cut {
            return Err(status);
        }
        sleep(Duration::from_millis(50)).await;
        Ok(())
    }

    fn present(&self) -> Vec<u8> {
        self.session.lock().unwrap().token.clone()
    }
}

fn session_header(token: &[u8]) -> (&'static str, String) {
    ("astraflow-session-bin", binary(token))
}

/// A stream that is opened again when it is cut.
pub struct Stream<R, Q, A> {
    member: Arc<Member<R>>,
    path: &'static str,
    start: Box<dyn Fn(Sink<Q>) -> JoinHandle<()> + Send>,
    open: Option<(Answers<A>, Vec<u8>, JoinHandle<()>)>,
    reconciles: bool,
    // Of the last opening, and how long it is tried again.
    began: Instant,
    end: Instant,
}

impl<R: Role, Q: Message, A: Message + Default> Stream<R, Q, A> {
    /// Joins again after a cut, by which the run finds out what the cut swallowed.
    pub fn reconciling(mut self) -> Self {
        self.reconciles = true;
        self
    }

    /// Returns the next event; None: the stream ended well.
    pub async fn next(&mut self) -> Result<Option<A>, Status> {
        loop {
            let token = self.open.as_ref().map_or_else(|| self.member.present(), |open| open.1.clone());
            let event = self.read(&token).await;
            // One that stood for long was no failure to open it.
            if event.is_ok() || self.began.elapsed() > PATIENCE {
                self.end = Instant::now() + PATIENCE;
            }
            match event {
                Ok(event) => return Ok(event),
                Err(status) => {
                    self.close();
                    self.member.mend(status, self.end, &token).await?;
                    if self.reconciles {
                        // Why it failed the next call says.
                        let _ = self.member.enter(&token).await;
                    }
                }
            }
        }
    }

    async fn read(&mut self, token: &[u8]) -> Result<Option<A>, Status> {
        if self.open.is_none() {
            self.began = Instant::now();
            let metadata: Metadata = vec![session_header(token)];
            let (sink, answers) = self.member.hub.open(self.path, metadata, None).await?;
            self.open = Some((answers, token.into(), (self.start)(sink)));
        }
        self.open.as_mut().expect("it was just opened").0.next().await
    }

    // What is sent on a stream ends with it.
    fn close(&mut self) {
        if let Some((_, _, sender)) = self.open.take() {
            sender.abort();
        }
    }
}

impl<R, Q, A> Drop for Stream<R, Q, A> {
    fn drop(&mut self) {
        if let Some((_, _, sender)) = self.open.take() {
            sender.abort();
        }
    }
}

/// Sends one request, for calls with a stream of answers alone.
pub fn asking<Q: Message + Clone + 'static>(
    request: Q,
) -> impl Fn(Sink<Q>) -> JoinHandle<()> + Send + 'static {
    move |mut sink| {
        let request = request.clone();
        tokio::spawn(async move {
            if sink.send(&request).await.is_ok() {
                sink.finish();
            }
        })
    }
}
