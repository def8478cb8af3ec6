//! What a TokenReview and a pod say about the bearer of a token.

use k8s_openapi::api::authentication::v1::{TokenReviewStatus, UserInfo};
use k8s_openapi::api::core::v1::Pod;

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

/// The bearer of a token that must be of this service account (namespace and name) and audience; otherwise the reason.
pub(super) fn bearer(
    status: &TokenReviewStatus,
    (namespace, service_account): (&str, &str),
    audience: &str,
) -> Result<Bearer, String> {
    if status.authenticated != Some(true) {
        let reason = status.error.as_deref().unwrap_or("it may have expired, or be of another cluster");
        return Err(format!("the API server doesn't accept the token: {reason}"));
    }
    // Without audiences the API server doesn't know them, and the token may have been made for anybody.
    if !status.audiences.iter().flatten().any(|of| of == audience) {
        return Err(format!("the token isn't for the audience {audience}"));
    }
    let user = status.user.as_ref().ok_or("the token is nobody's")?;
    let expected = format!("system:serviceaccount:{namespace}:{service_account}");
    let name = user.username.as_deref().unwrap_or_default();
    if name != expected {
        return Err(format!("the token is that of {name}, not of {expected}"));
    }
    if let Some(node) = extra(user, NODE_NAME) {
        return Ok(Bearer::Node(node));
    }
    match (extra(user, POD_NAME), extra(user, POD_UID)) {
        (Some(name), Some(uid)) => Ok(Bearer::Pod { name, uid }),
        _ => Err("the token isn't bound to a pod".to_owned()),
    }
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
