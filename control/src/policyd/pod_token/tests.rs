//! Which pod a token is of: cases of reviews and pods.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::{TokenReviewStatus, UserInfo};
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::*;

const POD: [(&str, &str); 2] =
    [("authentication.kubernetes.io/pod-name", "agent-x"), ("authentication.kubernetes.io/pod-uid", "uid-1")];

fn review(username: &str, audiences: &[&str], extra: &[(&str, &str)]) -> TokenReviewStatus {
    let extra: BTreeMap<_, _> = extra.iter().map(|(name, value)| (name.to_string(), vec![value.to_string()])).collect();
    let user = UserInfo { username: Some(username.to_owned()), extra: Some(extra), ..UserInfo::default() };
    let audiences = Some(audiences.iter().map(ToString::to_string).collect());
    TokenReviewStatus { authenticated: Some(true), audiences, user: Some(user), error: None }
}

/// Gateways with an audience of their own, and agents.
fn accounts() -> Vec<(PodRole, PodTokens)> {
    let account = |service_account: &str, audience: &str| PodTokens {
        namespace: "vipgate".to_owned(),
        service_account: service_account.to_owned(),
        audience: audience.to_owned(),
    };
    vec![
        (PodRole::Gateway, account("vipgate-gateway", "gateways")),
        (PodRole::Agent, account("vipgate-node", "vipgate")),
    ]
}

fn bearer_of(status: &TokenReviewStatus) -> Result<(PodRole, Bearer), String> {
    let accounts = accounts();
    bearer(status, &accounts).map(|(role, namespace, bearer)| {
        assert_eq!(namespace, "vipgate");
        (role, bearer)
    })
}

#[test]
fn a_token_of_an_account_for_its_audience_is_that_of_its_pods_node() {
    let agent = "system:serviceaccount:vipgate:vipgate-node";
    let with_node = [POD[0], POD[1], ("authentication.kubernetes.io/node-name", "node-1")];
    let node = || Bearer::Node("node-1".to_owned());
    assert_eq!(bearer_of(&review(agent, &["vipgate"], &with_node)), Ok((PodRole::Agent, node())));
    let gateway = "system:serviceaccount:vipgate:vipgate-gateway";
    assert_eq!(bearer_of(&review(gateway, &["gateways"], &with_node)), Ok((PodRole::Gateway, node())));
    let pod = Bearer::Pod { name: "agent-x".to_owned(), uid: "uid-1".to_owned() };
    assert_eq!(bearer_of(&review(agent, &["other", "vipgate"], &POD)), Ok((PodRole::Agent, pod)));
    for (status, reason) in [
        (review("system:serviceaccount:vipgate:default", &["vipgate"], &with_node), "is that of system:serviceaccount"),
        (review("system:serviceaccount:other:vipgate-node", &["vipgate"], &with_node), "is that of"),
        (review("vipgate-node", &["vipgate"], &with_node), "is that of vipgate-node"),
        (review(gateway, &["vipgate"], &with_node), "isn't for the audience gateways"),
        (review(agent, &["gateways"], &with_node), "isn't for the audience vipgate"),
        (review(agent, &["https://kubernetes.default.svc"], &with_node), "isn't for the audience vipgate"),
        (review(agent, &[], &with_node), "isn't for the audience"),
        (review(agent, &["vipgate"], &POD[..1]), "isn't bound to a pod"),
        (review(agent, &["vipgate"], &[("authentication.kubernetes.io/node-name", "")]), "isn't bound to a pod"),
        (TokenReviewStatus { authenticated: None, ..review(agent, &["vipgate"], &with_node) }, "doesn't accept"),
        (TokenReviewStatus { authenticated: Some(false), ..review(agent, &["vipgate"], &with_node) }, "doesn't accept"),
        (TokenReviewStatus { user: None, ..review(agent, &["vipgate"], &with_node) }, "nobody's"),
    ] {
        let got = bearer_of(&status).unwrap_err();
        assert!(got.contains(reason), "{got:?} for {reason:?}");
    }
}

#[test]
fn the_pod_must_be_the_one_that_the_token_was_made_for() {
    let pod = |uid: &str, node: Option<&str>| Pod {
        metadata: ObjectMeta { uid: Some(uid.to_owned()), ..ObjectMeta::default() },
        spec: Some(PodSpec { node_name: node.map(str::to_owned), ..PodSpec::default() }),
        ..Pod::default()
    };
    let node = |pod: Option<Pod>| node_of_pod(pod.as_ref(), "agent-x", "uid-1");
    assert_eq!(node(Some(pod("uid-1", Some("node-1")))).as_deref(), Ok("node-1"));
    for gone in [None, Some(pod("uid-2", Some("node-1")))] {
        assert!(node(gone).unwrap_err().contains("which is gone"));
    }
    for nowhere in [None, Some("")] {
        assert!(node(Some(pod("uid-1", nowhere))).unwrap_err().contains("on no node"));
    }
}

#[tokio::test]
async fn decisions_hold_for_a_while_and_are_bounded() {
    let verifier = TokenVerifier::new(accounts(), KubernetesSource::default());
    let pod = VerifiedPod { role: PodRole::Agent, node: "node-1".into() };
    let token = "a.b.c";
    let hash = hash(token);
    verifier.decide(hash, Ok(pod.clone()), ACCEPTED_FOR);
    assert_eq!(verifier.pod(token).await.unwrap(), pod, "without a request: there is no API server");
    verifier.decide(hash, Err("expired".into()), REJECTED_FOR);
    assert_eq!(verifier.pod(token).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    verifier.decide(hash, Ok(pod), Duration::ZERO);
    assert_eq!(verifier.pod(token).await.unwrap_err().code(), tonic::Code::Unavailable);
    for malformed in ["", "abc", "a.b.c.d", &"a.b.".repeat(MAX_TOKEN_BYTES)] {
        assert_eq!(verifier.pod(malformed).await.unwrap_err().code(), tonic::Code::Unauthenticated);
    }
    for n in 0..3 * MAX_DECISIONS as u64 {
        let mut hash = TokenHash::default();
        hash[..8].copy_from_slice(&n.to_be_bytes());
        verifier.decide(hash, Err(String::new()), REJECTED_FOR);
    }
    assert!(verifier.decisions.lock().unwrap().len() <= MAX_DECISIONS);
}
