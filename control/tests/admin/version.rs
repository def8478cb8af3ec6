//! Version mismatch between gateway and command line: every command reports it and sends no further request.

use std::pin::Pin;

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
    FlushSessionsRequest, PeersReply, PeersRequest, PlacementReply, PlacementRequest, PortsReply, PortsRequest,
    ServicesReply, ServicesRequest, SessionsReply, SessionsRequest, StatusReply, StatusRequest, TraceReply,
    TraceRequest, VipsReply, VipsRequest,
};

use crate::gateway::vipgate;

/// A gateway with a newer protocol. Requests other than its status are errors of the test.
struct NewerGateway;

type Reply<T> = Result<Response<T>, Status>;

fn unexpected<T>() -> Reply<T> {
    Err(Status::internal("request despite the version mismatch"))
}

#[tonic::async_trait]
impl Admin for NewerGateway {
    type SessionsStream = Pin<Box<dyn Stream<Item = Result<SessionsReply, Status>> + Send>>;

    async fn status(&self, _: Request<StatusRequest>) -> Reply<StatusReply> {
        let status = StatusReply { protocol: PROTOCOL + 1, version: "9.9.9".to_owned(), ..Default::default() };
        Ok(Response::new(status))
    }

    async fn sessions(&self, _: Request<SessionsRequest>) -> Reply<Self::SessionsStream> {
        unexpected()
    }

    async fn flush_sessions(&self, _: Request<FlushSessionsRequest>) -> Reply<FlushSessionsReply> {
        unexpected()
    }

    async fn vips(&self, _: Request<VipsRequest>) -> Reply<VipsReply> {
        unexpected()
    }

    async fn endpoints(&self, _: Request<EndpointsRequest>) -> Reply<EndpointsReply> {
        unexpected()
    }

    async fn services(&self, _: Request<ServicesRequest>) -> Reply<ServicesReply> {
        unexpected()
    }

    async fn peers(&self, _: Request<PeersRequest>) -> Reply<PeersReply> {
        unexpected()
    }

    async fn placement(&self, _: Request<PlacementRequest>) -> Reply<PlacementReply> {
        unexpected()
    }

    async fn accept_empty(&self, _: Request<AcceptEmptyRequest>) -> Reply<AcceptEmptyReply> {
        unexpected()
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Reply<DrainReply> {
        unexpected()
    }

    async fn drops(&self, _: Request<DropsRequest>) -> Reply<DropsReply> {
        unexpected()
    }

    async fn ports(&self, _: Request<PortsRequest>) -> Reply<PortsReply> {
        unexpected()
    }

    async fn trace(&self, _: Request<TraceRequest>) -> Reply<TraceReply> {
        unexpected()
    }

    async fn explain(&self, _: Request<ExplainRequest>) -> Reply<ExplainReply> {
        unexpected()
    }

    type CaptureStream = Pin<Box<dyn Stream<Item = Result<CaptureReply, Status>> + Send>>;

    async fn capture(&self, _: Request<CaptureRequest>) -> Reply<Self::CaptureStream> {
        unexpected()
    }
}

/// Runs a server on a socket and every command against it; returns their stderr.
fn run_all_commands(router: tonic::transport::server::Router) -> Vec<String> {
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
    let commands: [&[&str]; 12] = [
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
        &["policy", "accept-empty"],
    ];
    let errors = commands.map(|command| {
        let (code, stdout, stderr) = vipgate(&[command, &["--socket", path.to_str().unwrap()]].concat());
        assert_eq!((code, stdout.as_str()), (1, ""), "{command:?}: {stderr}");
        stderr
    });
    stop.send(()).unwrap();
    server.join().unwrap();
    errors.into()
}

#[test]
fn a_newer_gateway_is_reported_with_both_versions() {
    for stderr in run_all_commands(Server::builder().add_service(AdminServer::new(NewerGateway))) {
        let gateway_version = format!("the gateway is vipgate 9.9.9 with version {} of the admin API", PROTOCOL + 1);
        let own_version = format!("this command is vipgate {} with version {PROTOCOL}", env!("CARGO_PKG_VERSION"));
        assert!(stderr.contains(&gateway_version) && stderr.contains(&own_version), "{stderr}");
        assert!(stderr.contains("gateway.sock"), "{stderr}");
    }
}

#[test]
fn a_gateway_without_the_admin_service_is_reported() {
    let empty = Server::builder().add_routes(tonic::service::Routes::default());
    for stderr in run_all_commands(empty) {
        assert!(stderr.contains("the gateway is one that doesn't support this request"), "{stderr}");
    }
}
