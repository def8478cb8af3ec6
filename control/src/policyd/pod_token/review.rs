//! What a TokenReview and a pod say about the bearer of a token.

use k8s_openapi::api::authentication::v1::{TokenReviewStatus, UserInfo};
use k8s_openapi::api::core::v1::Pod;

use crate::config::PodTokens;
use crate::policyd::identity::PodRole;

/// Names in the review of a token that is bound to a pod. The node's is there since Kubernetes 1.30.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Whose a token is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Bearer {
    /// A pod on this node.
    Node(String),
    Pod {
        name: String,
        /// Its uid: a later pod may have the name.
        uid: String,
    },
}

/// The bearer of a token that must be of one of these service accounts, for its audience: what its pods are, and their
/// namespace; otherwise the reason.
pub(super) fn bearer<'a>(
    status: &TokenReviewStatus,
    accounts: &'a [(PodRole, PodTokens)],
) -> Result<(PodRole, &'a str, Bearer), String> {
    if status.authenticated != Some(true) {
        let reason = status.error.as_deref().unwrap_or("it may have expired, or be of another cluster");
        return Err(format!("the API server doesn't accept the token: {reason}"));
    }
    let user = status.user.as_ref().ok_or("the token is nobody's")?;
    let name = user.username.as_deref().unwrap_or_default();
    let Some((role, account)) = accounts.iter().find(|(_, account)| username(account) == name) else {
        let expected: Vec<String> = accounts.iter().map(|(_, account)| username(account)).collect();
        return Err(format!("the token is that of {name}, not of {}", expected.join(" or ")));
    };
    // Without audiences the API server doesn't know them, and the token may have been made for anybody.
    if !status.audiences.iter().flatten().any(|of| *of == account.audience) {
        return Err(format!("the token isn't for the audience {}", account.audience));
    }
    let bearer = match (extra(user, NODE_NAME), extra(user, POD_NAME), extra(user, POD_UID)) {
        (Some(node), ..) => Bearer::Node(node),
        (None, Some(name), Some(uid)) => Bearer::Pod { name, uid },
        _ => return Err("the token isn't bound to a pod".to_owned()),
    };
    Ok((*role, account.namespace.as_str(), bearer))
}

fn username(account: &PodTokens) -> String {
    format!("system:serviceaccount:{}:{}", account.namespace, account.service_account)
}

/// The only value with this name.
fn extra(user: &UserInfo, name: &str) -> Option<String> {
    match &user.extra.as_ref()?.get(name)?[..] {
        [value] if !value.is_empty() => Some(value.clone()),
        _ => None,
    }
}

/// The node of the pod with this name and uid; otherwise the reason.
pub(super) fn node_of_pod(pod: Option<&Pod>, name: &str, uid: &str) -> Result<String, String> {
    let pod = pod.filter(|pod| pod.metadata.uid.as_deref() == Some(uid));
    let pod = pod.ok_or_else(|| format!("the token is that of pod {name}, which is gone"))?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).filter(|node| !node.is_empty());
    node.ok_or_else(|| format!("the token is that of pod {name}, which is on no node"))
}
