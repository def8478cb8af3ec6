//! Tokens of gateways and node agents in pods. One without a certificate shows the token of its pod's service account
//! (`authorization: Bearer`), whose audience is vipgate. The API server says whose it is (TokenReview), and on which node
//! that pod runs: that node's gateway or agent it is, and nothing else.
//!
//! ```text
//!   layer    requests of clients that have shown no certificate
//!   review   what a TokenReview says (pure)
//! ```
//! A token that was accepted isn't asked about again for [`ACCEPTED_FOR`]: a thousand agents open two streams each when
//! they have found another leader.

mod layer;
mod review;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use ring::digest::{SHA256, digest};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::timeout;
use tonic::Status;

pub(super) use self::layer::PodTokenLayer;
use self::review::{Bearer, bearer, node_of_pod};
use super::identity::{PodRole, VerifiedPod};
use crate::config::{KubernetesSource, PodTokens, PolicydConfig, PolicydSource};
use crate::source::kubernetes::{RequestError, ReusedClient, request};

/// Maximum length of a token, bytes.
const MAX_TOKEN_BYTES: usize = 8192;
/// For how long a decision about a token holds.
const ACCEPTED_FOR: Duration = Duration::from_mins(1);
const REJECTED_FOR: Duration = Duration::from_secs(10);
/// Maximum number of decisions that are kept.
const MAX_DECISIONS: usize = 8192;
/// Maximum number of requests to the API server at once: anybody may send a token.
const MAX_REQUESTS: usize = 8;
/// Timeout of a request, and of waiting for its turn.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);

/// Verifies tokens.
pub(super) struct TokenVerifier {
    accounts: Vec<(PodRole, PodTokens)>,
    client: AsyncMutex<ReusedClient>,
    requests: Semaphore,
    decisions: Mutex<HashMap<TokenHash, Decision>>,
}

/// Hash of a token: tokens aren't kept.
type TokenHash = [u8; 32];

/// What was decided about a token.
struct Decision {
    outcome: Result<VerifiedPod, String>,
    until: Instant,
}

/// Why a token isn't accepted.
enum TokenError {
    /// It is nobody's who may be a client.
    Rejected(String),
    /// The API server can't say.
    Undecided(String),
}

impl TokenVerifier {
    /// The verifier of a configuration, if it accepts tokens.
    pub(super) fn configured(config: &PolicydConfig) -> Option<Arc<Self>> {
        let gateways = config.gateway_tokens.iter().map(|tokens| (PodRole::Gateway, tokens.clone()));
        let agents = config.node_agents.iter().filter_map(|agents| agents.tokens.clone());
        let accounts: Vec<_> = gateways.chain(agents.map(|tokens| (PodRole::Agent, tokens))).collect();
        let source = match &config.source {
            PolicydSource::Kubernetes(source) => source.clone(),
            // The pod's own cluster.
            PolicydSource::Files(_) | PolicydSource::Etcd(_) => KubernetesSource::default(),
        };
        (!accounts.is_empty()).then(|| Arc::new(Self::new(accounts, source)))
    }

    /// Of pods of these service accounts.
    pub(super) fn new(accounts: Vec<(PodRole, PodTokens)>, source: KubernetesSource) -> Self {
        let requests = Semaphore::new(MAX_REQUESTS);
        Self { accounts, client: AsyncMutex::new(ReusedClient::new(source)), requests, decisions: Mutex::default() }
    }

    /// The pod that this token is of.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if it is none's, `UNAVAILABLE` if the API server doesn't say.
    pub(super) async fn pod(&self, token: &str) -> Result<VerifiedPod, Status> {
        // A JSON Web Token in its compact form (RFC 7519) has three parts.
        if token.len() > MAX_TOKEN_BYTES || token.split('.').count() != 3 {
            return Err(Status::unauthenticated("the token isn't one of a service account"));
        }
        let hash = hash(token);
        if let Some(outcome) = self.decided(&hash) {
            return outcome.map_err(Status::unauthenticated);
        }
        let unavailable = |reason: String| Status::unavailable(format!("the token can't be verified: {reason}"));
        let Ok(Ok(_permit)) = timeout(QUEUE_TIMEOUT, self.requests.acquire()).await else {
            return Err(unavailable("too many tokens are being verified".to_owned()));
        };
        // Another stream of the same client may have waited with it.
        if let Some(outcome) = self.decided(&hash) {
            return outcome.map_err(Status::unauthenticated);
        }
        match self.ask(token).await {
            Ok(pod) => {
                self.decide(hash, Ok(pod.clone()), ACCEPTED_FOR);
                Ok(pod)
            }
            Err(TokenError::Rejected(reason)) => {
                self.decide(hash, Err(reason.clone()), REJECTED_FOR);
                Err(Status::unauthenticated(reason))
            }
            Err(TokenError::Undecided(reason)) => Err(unavailable(reason)),
        }
    }

    /// Asks the API server whose the token is, and then on which node the pod runs, if it doesn't say.
    async fn ask(&self, token: &str) -> Result<VerifiedPod, TokenError> {
        let undecided = |error: RequestError| TokenError::Undecided(error.to_string());
        let client = self.client().await.map_err(TokenError::Undecided)?;
        let mut audiences: Vec<String> = self.accounts.iter().map(|(_, account)| account.audience.clone()).collect();
        audiences.sort_unstable();
        audiences.dedup();
        let spec = TokenReviewSpec { audiences: Some(audiences), token: Some(token.to_owned()) };
        let question = TokenReview { spec, ..TokenReview::default() };
        let reviews = Api::<TokenReview>::all(client.clone());
        let review = request(REQUEST_TIMEOUT, reviews.create(&PostParams::default(), &question)).await;
        let review = self.used(review).await.map_err(undecided)?;
        let status = review.status.unwrap_or_default();
        let (role, namespace, bearer) = bearer(&status, &self.accounts).map_err(TokenError::Rejected)?;
        let (name, uid) = match bearer {
            Bearer::Node(node) => return Ok(VerifiedPod { role, node: node.into() }),
            Bearer::Pod { name, uid } => (name, uid),
        };
        let pods = Api::<Pod>::namespaced(client, namespace);
        let pod = self.used(request(REQUEST_TIMEOUT, pods.get_opt(&name)).await).await.map_err(undecided)?;
        let node = node_of_pod(pod.as_ref(), &name, &uid).map_err(TokenError::Rejected)?;
        Ok(VerifiedPod { role, node: node.into() })
    }

    async fn client(&self) -> Result<Client, String> {
        self.client.lock().await.get().await.map_err(|error| error.to_string())
    }

    /// Discards the client after a failure that isn't an answer: its credentials may be others by now.
    async fn used<T>(&self, outcome: Result<T, RequestError>) -> Result<T, RequestError> {
        if outcome.as_ref().is_err_and(|error| error.code().is_none_or(|code| code == 401)) {
            self.client.lock().await.discard();
        }
        outcome
    }

    /// Decides that a token is that of a pod on a node.
    #[cfg(test)]
    pub(super) fn accept(&self, token: &str, role: PodRole, node: &str) {
        self.decide(hash(token), Ok(VerifiedPod { role, node: node.into() }), ACCEPTED_FOR);
    }

    fn decided(&self, hash: &TokenHash) -> Option<Result<VerifiedPod, String>> {
        let decisions = self.decisions.lock().unwrap_or_else(PoisonError::into_inner);
        decisions.get(hash).filter(|decision| decision.until > Instant::now()).map(|decision| decision.outcome.clone())
    }

    fn decide(&self, hash: TokenHash, outcome: Result<VerifiedPod, String>, holds_for: Duration) {
        let now = Instant::now();
        let mut decisions = self.decisions.lock().unwrap_or_else(PoisonError::into_inner);
        if decisions.len() >= MAX_DECISIONS {
            decisions.retain(|_, decision| decision.until > now);
        }
        // Still full: of tokens that somebody makes up. Those of pods are asked about again.
        if decisions.len() >= MAX_DECISIONS {
            decisions.clear();
        }
        decisions.insert(hash, Decision { outcome, until: now + holds_for });
    }
}

fn hash(token: &str) -> TokenHash {
    let mut hash = TokenHash::default();
    hash.copy_from_slice(digest(&SHA256, token.as_bytes()).as_ref());
    hash
}

#[cfg(test)]
mod tests;
