//! A gateway and a command line of different versions: every command says so and asks nothing else.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod gateway;

use std::pin::Pin;

use gateway::vipgate;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use vipgate::admin::PROTOCOL;
use vipgate::admin::proto::admin_server::{Admin, AdminServer};
use vipgate::admin::proto::{
    AcceptEmptyReply, AcceptEmptyRequest, CaptureReply, CaptureRequest, DrainReply, DrainRequest, DropsReply,
    DropsRequest, EndpointsReply, EndpointsRequest, ExplainReply, ExplainRequest, FlushSessionsReply,
    FlushSessionsRequest, PeersReply, PeersRequest, PortsReply, PortsRequest, ServicesReply, ServicesRequest,
    SessionsReply, SessionsRequest, StatusReply, StatusRequest, TraceReply, TraceRequest, VipsReply, VipsRequest,
};

/// A gateway of next year. Whoever asks more than its status has misunderstood.
struct Newer;

type Answer<T> = Result<Response<T>, Status>;

fn misunderstood<T>() -> Answer<T> {
    Err(Status::internal("asked in spite of the version"))
}

#[tonic::async_trait]
impl Admin for Newer {
    type SessionsStream = Pin<Box<dyn Stream<Item = Result<SessionsReply, Status>> + Send>>;

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusReply> {
        let status = StatusReply { protocol: PROTOCOL + 1, version: "9.9.9".to_owned(), ..Default::default() };
        Ok(Response::new(status))
    }

    async fn sessions(&self, _: Request<SessionsRequest>) -> Answer<Self::SessionsStream> {
        misunderstood()
    }

    async fn flush_sessions(&self, _: Request<FlushSessionsRequest>) -> Answer<FlushSessionsReply> {
        misunderstood()
    }

    async fn vips(&self, _: Request<VipsRequest>) -> Answer<VipsReply> {
        misunderstood()
    }

    async fn endpoints(&self, _: Request<EndpointsRequest>) -> Answer<EndpointsReply> {
        misunderstood()
    }

    async fn services(&self, _: Request<ServicesRequest>) -> Answer<ServicesReply> {
        misunderstood()
    }

    async fn peers(&self, _: Request<PeersRequest>) -> Answer<PeersReply> {
        misunderstood()
    }

    async fn accept_empty(&self, _: Request<AcceptEmptyRequest>) -> Answer<AcceptEmptyReply> {
        misunderstood()
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Answer<DrainReply> {
        misunderstood()
    }

    async fn drops(&self, _: Request<DropsRequest>) -> Answer<DropsReply> {
        misunderstood()
    }

    async fn ports(&self, _: Request<PortsRequest>) -> Answer<PortsReply> {
        misunderstood()
    }

    async fn trace(&self, _: Request<TraceRequest>) -> Answer<TraceReply> {
        misunderstood()
    }

    async fn explain(&self, _: Request<ExplainRequest>) -> Answer<ExplainReply> {
        misunderstood()
    }

    type CaptureStream = Pin<Box<dyn Stream<Item = Result<CaptureReply, Status>> + Send>>;

    async fn capture(&self, _: Request<CaptureRequest>) -> Answer<Self::CaptureStream> {
        misunderstood()
    }
}

/// Runs a server on a socket, asks it with every command, gives what each says on stderr.
fn ask_everything(router: tonic::transport::server::Router) -> Vec<String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("gateway.sock");
    let socket = path.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = {
        let _context = runtime.enter();
        UnixListener::bind(&socket).unwrap()
    };
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                result = router.serve_with_incoming(UnixListenerStream::new(listener)) => result.unwrap(),
                _ = stopped => {}
            }
        });
    });
    let commands: [&[&str]; 13] = [
        &["status"],
        &["sessions"],
        &["sessions", "flush", "--all"],
        &["vips"],
        &["endpoints"],
        &["services"],
        &["drops"],
        &["ports"],
        &["trace", "--from", "10.1.0.11", "--to", "198.51.100.10"],
        &["explain", "10.1.0.11"],
        &["capture"],
        &["top", "--once"],
        &["policy", "accept-empty"],
    ];
    let said = commands.map(|command| {
        let (code, stdout, stderr) = vipgate(&[command, &["--socket", path.to_str().unwrap()]].concat());
        assert_eq!((code, stdout.as_str()), (1, ""), "{command:?}: {stderr}");
        stderr
    });
    stop.send(()).unwrap();
    server.join().unwrap();
    said.into()
}

#[test]
fn a_newer_gateway_is_named_with_both_versions() {
    for stderr in ask_everything(Server::builder().add_service(AdminServer::new(Newer))) {
        let theirs = format!("the gateway is vipgate 9.9.9 with version {} of the admin interface", PROTOCOL + 1);
        let ours = format!("this command is vipgate {} with version {PROTOCOL}", env!("CARGO_PKG_VERSION"));
        assert!(stderr.contains(&theirs) && stderr.contains(&ours), "{stderr}");
        assert!(stderr.contains("gateway.sock"), "{stderr}");
    }
}

#[test]
fn a_gateway_without_this_service_is_of_another_version() {
    let empty = Server::builder().add_routes(tonic::service::Routes::default());
    for stderr in ask_everything(empty) {
        assert!(stderr.contains("the gateway is one that doesn't know this question"), "{stderr}");
    }
}
