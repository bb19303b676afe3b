//! gRPC over HTTP/2: calls, streams, and a server of a handler. A program of your own may take tonic.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::future::poll_fn;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use prost::Message;
use tokio::net::{TcpListener, TcpStream};

pub const UNKNOWN: i32 = 2;
pub const INVALID_ARGUMENT: i32 = 3;
pub const DEADLINE_EXCEEDED: i32 = 4;
pub const NOT_FOUND: i32 = 5;
pub const UNIMPLEMENTED: i32 = 12;
pub const UNAVAILABLE: i32 = 14;
pub const DATA_LOSS: i32 = 15;
pub const UNAUTHENTICATED: i32 = 16;

const WINDOW: u32 = 4 << 20;
/// A part of a batch has at most 64 MiB.
const MAX_MESSAGE_NBYTES: usize = 80 << 20;

pub type Metadata = Vec<(&'static str, String)>;

/// Returns the value of a header whose name ends in -bin.
pub fn binary(value: &[u8]) -> String {
    base64::encode_config(value, base64::STANDARD_NO_PAD)
}

/// Returns what such a header carries; empty: nothing.
pub fn from_binary(value: Option<&HeaderValue>) -> Vec<u8> {
    let told = value.and_then(|text| text.to_str().ok()).unwrap_or_default();
    let bare = told.trim_end_matches('=');
    base64::decode_config(bare, base64::STANDARD_NO_PAD).unwrap_or_default()
}

/// How a call failed. The reason is a name of the contract's Reason, without REASON_; empty: none.
#[derive(Debug, Clone)]
pub struct Status {
    pub code: i32,
    pub reason: String,
    pub message: String,
}

/// google.rpc.Status, and the detail that errors of the contract carry.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
}

impl Status {
    pub fn new(code: i32, reason: &str, message: impl ToString) -> Self {
        Status { code, reason: reason.into(), message: message.to_string() }
    }

    /// The other end is not there, or went away.
    fn cut(error: impl ToString) -> Self {
        Status::new(UNAVAILABLE, "", error)
    }

    fn from_headers(headers: &HeaderMap) -> Result<(), Status> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let code = text("grpc-status").and_then(|code| code.parse().ok()).unwrap_or(UNKNOWN);
        if code == 0 {
            return Ok(());
        }
        let details = from_binary(headers.get("grpc-status-details-bin"));
        let told = RpcStatus::decode(details.as_slice()).unwrap_or_default();
        let infos = told.details.iter().filter(|any| any.type_url.ends_with("/google.rpc.ErrorInfo"));
        let reason = infos.filter_map(|any| ErrorInfo::decode(any.value.as_slice()).ok()).next();
        let reason = reason.map(|info| info.reason).unwrap_or_default();
        Err(Status { code, reason, message: text("grpc-message").unwrap_or_default().into() })
    }

    fn write(&self, headers: &mut HeaderMap) {
        let info = ErrorInfo { reason: self.reason.clone(), domain: "astraflow".into() };
        let any = prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.ErrorInfo".into(),
            value: info.encode_to_vec(),
        };
        let details = if self.reason.is_empty() { vec![] } else { vec![any] };
        let told = RpcStatus { code: self.code, message: self.message.clone(), details };
        headers.insert("grpc-status", self.code.into());
        if let Ok(message) = HeaderValue::from_str(&self.message) {
            headers.insert("grpc-message", message);
        }
        let bytes = HeaderValue::from_str(&binary(&told.encode_to_vec()));
        headers.insert("grpc-status-details-bin", bytes.expect("base64 is ASCII"));
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.code, self.reason, self.message)
    }
}

impl std::error::Error for Status {}

/// A connection to a host, made when it is needed and made again when it broke.
pub struct Channel {
    address: String,
    link: tokio::sync::Mutex<Option<SendRequest<Bytes>>>,
}

impl Channel {
    pub fn new(address: &str) -> Self {
        Channel { address: address.into(), link: tokio::sync::Mutex::new(None) }
    }

    /// Makes a call of one message either way.
    pub async fn unary<Q: Message, A: Message + Default>(
        &self,
        path: &str,
        metadata: Metadata,
        request: &Q,
        deadline: Duration,
    ) -> Result<A, Status> {
        let call = async {
            let (mut sink, mut answers) = self.open::<Q, A>(path, metadata, Some(deadline)).await?;
            sink.send(request).await?;
            sink.finish();
            let answer = answers.next().await?.ok_or_else(|| Status::cut("the call ended without an answer"));
            // The status comes last.
            answers.next().await?;
            answer
        };
        let timed_out = |_| Status::new(DEADLINE_EXCEEDED, "", "no answer in time");
        tokio::time::timeout(deadline, call).await.map_err(timed_out)?
    }

    /// Opens a call on which both ends may send any number of messages.
    pub async fn open<'a, Q, A>(
        &'a self,
        path: &'a str,
        metadata: Metadata,
        deadline: Option<Duration>,
    ) -> Result<(Sink<Q>, Answers<A>), Status> {
        let mut request = Request::post(format!("http://{}{path}", self.address))
            .header("te", "trailers")
            .header("content-type", "application/grpc");
        if let Some(deadline) = deadline {
            request = request.header("grpc-timeout", format!("{}m", deadline.as_millis()));
        }
        for (name, value) in metadata {
            request = request.header(name, value);
        }
        let request = request.body(()).map_err(|error| Status::new(INVALID_ARGUMENT, "", error))?;
        let (response, stream) = self.ready().await?.send_request(request, false).map_err(Status::cut)?;
        Ok((Sink { stream, messages: PhantomData }, Answers::new(response)))
    }

    async fn ready(&self) -> Result<SendRequest<Bytes>, Status> {
        let mut held = self.link.lock().await;
        if let Some(link) = held.clone() {
            if let Ok(link) = link.ready().await {
                return Ok(link);
            }
        }
        let socket = TcpStream::connect(&self.address).await.map_err(Status::cut)?;
        socket.set_nodelay(true).map_err(Status::cut)?;
        let (link, connection) = h2::client::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(4 * WINDOW)
            .handshake(socket)
            .await
            .map_err(Status::cut)?;
        // What breaks it is told by every call on it.
        tokio::spawn(connection);
        *held = Some(link.clone());
        link.ready().await.map_err(Status::cut)
    }
}

/// Where messages are sent.
pub struct Sink<Q> {
    stream: SendStream<Bytes>,
    messages: PhantomData<fn(Q)>,
}

impl<Q: Message> Sink<Q> {
    /// Sends a message, as the other end makes room for it.
    pub async fn send(&mut self, message: &Q) -> Result<(), Status> {
        send(&mut self.stream, frame(message)).await
    }

    /// Says that no more will come.
    pub fn finish(&mut self) {
        // Where this fails reading does as well, and says why.
        let _ = self.stream.send_data(Bytes::new(), true);
    }
}

fn frame(message: &impl Message) -> Bytes {
    let mut framed = BytesMut::with_capacity(5 + message.encoded_len());
    framed.put_u8(0);
    framed.put_u32(message.encoded_len() as u32);
    message.encode(&mut framed).expect("there is room for it");
    framed.freeze()
}

async fn send(stream: &mut SendStream<Bytes>, mut framed: Bytes) -> Result<(), Status> {
    while framed.has_remaining() {
        stream.reserve_capacity(framed.len());
        let room = poll_fn(|context| stream.poll_capacity(context)).await;
        let room = room.ok_or_else(|| Status::cut("the stream is closed"))?.map_err(Status::cut)?;
        let part = framed.split_to(room.min(framed.len()));
        stream.send_data(part, false).map_err(Status::cut)?;
    }
    Ok(())
}

/// What comes back.
pub struct Answers<A> {
    response: Option<ResponseFuture>,
    body: Option<Body>,
    messages: PhantomData<fn() -> A>,
}

impl<A: Message + Default> Answers<A> {
    /// Returns the next message; None: the call ended well.
    pub async fn next(&mut self) -> Result<Option<A>, Status> {
        if let Some(response) = self.response.take() {
            let (head, stream) = response.await.map_err(Status::cut)?.into_parts();
            if head.headers.contains_key("grpc-status") {
                return Status::from_headers(&head.headers).map(|()| None);
            }
            self.body = Some(Body { stream, held: BytesMut::new() });
        }
        let body = self.body.as_mut().ok_or_else(|| Status::cut("the call has ended"))?;
        if let Some(message) = body.next().await? {
            let broken = |error| Status::new(UNKNOWN, "", error);
            return A::decode(message).map(Some).map_err(broken);
        }
        let trailers = body.stream.trailers().await.map_err(Status::cut)?;
        Status::from_headers(&trailers.unwrap_or_default()).map(|()| None)
    }
}

impl<A> Answers<A> {
    fn new(response: ResponseFuture) -> Self {
        Answers { response: Some(response), body: None, messages: PhantomData }
    }
}

/// Messages out of the data of a stream.
struct Body {
    stream: RecvStream,
    held: BytesMut,
}

impl Body {
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if self.held.len() >= 5 {
                let nbytes = u32::from_be_bytes([self.held[1], self.held[2], self.held[3], self.held[4]]);
                if self.held[0] != 0 || nbytes as usize > MAX_MESSAGE_NBYTES {
                    return Err(Status::new(UNKNOWN, "", "a message that cannot be read"));
                }
                if self.held.len() >= 5 + nbytes as usize {
                    self.held.advance(5);
                    return Ok(Some(self.held.split_to(nbytes as usize).freeze()));
                }
            }
            match self.stream.data().await {
                Some(part) => {
                    let part = part.map_err(Status::cut)?;
                    self.held.extend_from_slice(&part);
                    self.stream.flow_control().release_capacity(part.len()).map_err(Status::cut)?;
                }
                None if self.held.is_empty() => return Ok(None),
                None => return Err(Status::cut("a message was cut")),
            }
        }
    }
}

/// Answers a call: its path, its metadata and its one message lead to messages, framed by `reply`.
pub type Handler = dyn Fn(&str, &HeaderMap, Bytes) -> Result<Vec<Bytes>, Status> + Send + Sync;

/// Returns a message of an answer.
pub fn reply(message: &impl Message) -> Bytes {
    frame(message)
}

/// Serves on a socket until the program ends.
pub async fn serve(listener: TcpListener, handler: Arc<Handler>) {
    while let Ok((socket, _)) = listener.accept().await {
        let handler = handler.clone();
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(socket).await.map_err(Status::cut)?;
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let handler = handler.clone();
                tokio::spawn(async move {
                    // Who hung up needs no answer.
                    let _ = answer(request, &mut respond, &*handler).await;
                });
            }
            Ok::<(), Status>(())
        });
    }
}

async fn answer(
    request: Request<RecvStream>,
    respond: &mut h2::server::SendResponse<Bytes>,
    handler: &Handler,
) -> Result<(), Status> {
    let (head, stream) = request.into_parts();
    let mut body = Body { stream, held: BytesMut::new() };
    let message = body.next().await?.unwrap_or_default();
    let mut response = Response::new(());
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    match handler(head.uri.path(), &head.headers, message) {
        Err(status) => {
            status.write(response.headers_mut());
            respond.send_response(response, true).map_err(Status::cut)?;
        }
        Ok(replies) => {
            let mut stream = respond.send_response(response, false).map_err(Status::cut)?;
            for reply in replies {
                send(&mut stream, reply).await?;
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", 0.into());
            stream.send_trailers(trailers).map_err(Status::cut)?;
        }
    }
    Ok(())
}
