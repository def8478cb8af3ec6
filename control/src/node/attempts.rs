//! Attempts of a client to reach a policy server, with backoff, each error logged once.

use std::path::PathBuf;
use std::time::Duration;

use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};

use crate::config::NodePolicyServer;
use crate::text_file::regular_text;
use crate::xds::client::{LoggedErrors, Target, TargetList, jittered};

/// Delay between attempts: first and maximum.
pub(super) type RetryDelay = (Duration, Duration);

/// The servers' addresses in turn, and what has failed since one was last reached.
pub(super) struct Attempts {
    targets: TargetList,
    bounds: RetryDelay,
    delay: Duration,
    logged: LoggedErrors,
    token: Option<PathBuf>,
}

impl Attempts {
    pub(super) fn new(server: &NodePolicyServer, bounds: RetryDelay) -> Self {
        let (targets, token) = (TargetList::new(&server.connection()), server.token.clone());
        Self { targets, bounds, delay: bounds.0, logged: LoggedErrors::default(), token }
    }

    /// A request with the agent's token, if it has one: read again for each request, since kubelet renews it.
    pub(super) fn request<T>(&self, message: T) -> Result<Request<T>, String> {
        let mut request = Request::new(message);
        if let Some(path) = &self.token {
            let failed = |reason: String| format!("server.token {}: {reason}", path.display());
            let token = regular_text(path).map_err(|error| failed(format!("can't be read: {error}")))?;
            let value: MetadataValue<Ascii> = format!("Bearer {}", token.trim())
                .parse()
                .map_err(|_| failed("is not a token: it has other than visible characters".to_owned()))?;
            request.metadata_mut().insert("authorization", value);
        }
        Ok(request)
    }

    /// The address to try.
    pub(super) async fn next(&mut self) -> Target {
        self.targets.next().await
    }

    /// A server was reached: it is preferred from now on.
    pub(super) fn connected(&mut self, target: &Target) {
        self.targets.prefer(target);
        self.delay = self.bounds.0;
        self.logged.clear();
    }

    /// Whether the reason why an attempt or a connection has ended is to be logged.
    pub(super) fn is_new(&mut self, reason: &str) -> bool {
        self.logged.is_new(reason)
    }

    /// Waits until the next attempt. The delay is for rounds, not for servers.
    pub(super) async fn wait(&mut self) {
        let is_last = !self.targets.has_more();
        tokio::time::sleep(jittered(if is_last { self.delay } else { self.bounds.0 })).await;
        if is_last {
            self.delay = (self.delay * 2).min(self.bounds.1);
        }
    }
}
