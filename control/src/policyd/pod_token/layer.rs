//! Tower layer that verifies the tokens of requests before they reach a service. Others pass as they are, and are
//! authorized by their certificates.

use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};

use super::TokenVerifier;
use crate::policyd::identity::RejectionLog;
use crate::policyd::listen::ConnectionInfo;
use crate::policyd::stats::Stats;

/// The authentication scheme (RFC 6750).
const SCHEME: &str = "Bearer ";

#[derive(Clone)]
pub(in crate::policyd) struct PodTokenLayer {
    /// `None`: tokens are ignored.
    pub(in crate::policyd) verifier: Option<Arc<TokenVerifier>>,
    pub(in crate::policyd) stats: Arc<Stats>,
    pub(in crate::policyd) rejections: Arc<RejectionLog>,
}

impl<S> Layer<S> for PodTokenLayer {
    type Service = PodTokenService<S>;

    fn layer(&self, inner: S) -> PodTokenService<S> {
        PodTokenService { inner, layer: self.clone() }
    }
}

/// A service whose requests have no tokens any more, but the pods that they are of.
#[derive(Clone)]
pub(in crate::policyd) struct PodTokenService<S> {
    inner: S,
    layer: PodTokenLayer,
}

impl<S> Service<Request<Body>> for PodTokenService<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Response<Body>, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let connection = request.extensions().get::<ConnectionInfo>();
        let has_no_certificate = connection.and_then(|it| it.certificates.as_ref()).is_some_and(|it| it.is_empty());
        let remote = connection.and_then(|it| it.remote);
        let token = token(request.headers()).map(str::to_owned).filter(|_| has_no_certificate);
        let (Some(verifier), Some(token)) = (self.layer.verifier.clone(), token) else {
            return Box::pin(self.inner.call(request));
        };
        request.headers_mut().remove(AUTHORIZATION);
        // The one that is ready; the clone is asked for the next request.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let PodTokenLayer { stats, rejections, .. } = self.layer.clone();
        Box::pin(async move {
            match verifier.pod(&token).await {
                Ok(pod) => {
                    request.extensions_mut().insert(pod);
                    inner.call(request).await
                }
                Err(status) => {
                    stats.certificate_mismatches.increment();
                    if let Some(remote) = remote {
                        rejections.log_client(remote, status.message());
                    }
                    Ok(Status::into_http(status))
                }
            }
        })
    }
}

/// The token of a request.
fn token(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix(SCHEME).map(str::trim)
}
