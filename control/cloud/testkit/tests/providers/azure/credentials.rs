//! Credentials: three sources, renewal, refusals, and that none is printed.

use std::path::Path;
use std::sync::Arc;

use vipgate_cloud::azure::{Azure, Config, CredentialSource};
use vipgate_cloud::{Associate, CallMeter, CloudError, ConfigError, ErrorKind, Observation, Provider};
use vipgate_cloud_testkit::{Fault, Reply};

use crate::azure::bench::{Bench, config, kind};

fn with(bench: &Bench, credentials: CredentialSource) -> Azure {
    let config = Config { credentials, ..config(&bench.server.url(), Associate::Nic) };
    Azure::new(&config, Arc::new(CallMeter::default())).expect("a valid configuration")
}

fn federated(bench: &Bench, file: &Path) -> CredentialSource {
    CredentialSource::Federated {
        authority: format!("{}/", bench.server.url()),
        tenant: "tenant-1".to_owned(),
        client: "client-1".to_owned(),
        token_file: file.to_owned(),
    }
}

fn secret(bench: &Bench, secret: &str) -> CredentialSource {
    CredentialSource::Secret {
        authority: bench.server.url(),
        tenant: "tenant-1".to_owned(),
        client: "client-1".to_owned(),
        secret: secret.to_owned(),
    }
}

async fn observe(bench: &Bench, provider: &Azure) -> Result<Observation, CloudError> {
    provider.observe(&bench.scope()).await
}

#[tokio::test]
async fn a_federated_token_is_read_again_each_time() {
    let bench = Bench::new().await;
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "subject-1\n").expect("written");
    let provider = with(&bench, federated(&bench, file.path()));
    observe(&bench, &provider).await.expect("an observation");
    observe(&bench, &provider).await.expect("an observation");
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()), 1, "a token is kept");
    bench.server.with(|cloud| {
        cloud.tokens.expire();
        cloud.tokens.subjects = ["subject-2".to_owned()].into();
    });
    std::fs::write(file.path(), "subject-2").expect("written");
    observe(&bench, &provider).await.expect("an observation");
    let issued = bench.server.with(|cloud| cloud.tokens.issued());
    assert!((2..=5).contains(&issued), "one for each request that was refused: {issued}");
}

#[tokio::test]
async fn a_secret_gives_a_token() {
    let bench = Bench::new().await;
    observe(&bench, &with(&bench, secret(&bench, "hidden"))).await.expect("an observation");
}

#[tokio::test]
async fn the_machine_gives_a_token_of_its_identity_or_of_a_named_one() {
    let bench = Bench::new().await;
    for client in [None, Some("client-1".to_owned())] {
        let credentials = CredentialSource::Managed { imds: bench.server.url(), client };
        observe(&bench, &with(&bench, credentials)).await.expect("an observation");
    }
    let client = Some("client-2".to_owned());
    let credentials = CredentialSource::Managed { imds: bench.server.url(), client };
    assert_eq!(kind(observe(&bench, &with(&bench, credentials)).await), ErrorKind::Credentials);
}

#[tokio::test]
async fn an_expired_token_is_replaced_once() {
    let bench = Bench::new().await;
    bench.addresses().await;
    bench.server.with(|cloud| cloud.tokens.expire());
    assert_eq!(bench.addresses().await.len(), 2);
    let before = bench.server.with(|cloud| cloud.tokens.issued());
    let refusal = Reply::json(401, &serde_json::json!({ "error": { "code": "InvalidAuthenticationToken" } }));
    bench.server.plan_fault(usize::MAX, Fault::Reply(refusal), |request| request.path.contains("publicIPAddresses"));
    assert_eq!(kind(bench.provider.observe(&bench.scope()).await), ErrorKind::Credentials);
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()) - before, 1);
}

#[tokio::test]
async fn a_short_token_is_renewed_before_it_ends() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| cloud.tokens.lifetime = 0);
    bench.addresses().await;
    let requests = bench.requests().len();
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()), requests);
}

#[tokio::test]
async fn concurrent_requests_share_one_token() {
    let bench = Bench::new().await;
    bench.observe().await;
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()), 1);
}

#[tokio::test]
async fn refused_credentials_say_why_and_are_in_no_error() {
    let bench = Bench::new().await;
    let error = observe(&bench, &with(&bench, secret(&bench, "guessed"))).await.expect_err("refused");
    assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Credentials, "invalid_client.AADSTS7000215"));
    for text in [format!("{error}"), format!("{error:?}")] {
        assert!(!text.contains("guessed") && !text.contains("quoted"), "{text}");
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "subject-9").expect("written");
    let error = observe(&bench, &with(&bench, federated(&bench, file.path()))).await.expect_err("refused");
    assert_eq!(error.code, "invalid_client.AADSTS700024");
    assert!(!format!("{error:?}").contains("subject-9"));
    let missing = federated(&bench, Path::new("/nonexistent/token"));
    let error = observe(&bench, &with(&bench, missing)).await.expect_err("no file");
    assert!(error.to_string().contains("/nonexistent/token"), "{error}");
}

#[tokio::test]
async fn a_metadata_server_that_is_out_of_order_is_asked_again() {
    let bench = Bench::new().await;
    let reply = Reply::text(410, "text/plain", String::new());
    bench.server.plan_fault(1, Fault::Reply(reply), |request| request.path.starts_with("/metadata"));
    assert_eq!(bench.addresses().await.len(), 2);
}

#[tokio::test]
async fn credentials_are_not_printed_and_not_sent_in_the_clear() {
    let bench = Bench::new().await;
    let source = secret(&bench, "hidden");
    let config = Config { credentials: source.clone(), ..config(&bench.server.url(), Associate::Nic) };
    let provider = with(&bench, source.clone());
    for text in [format!("{source:?}"), format!("{config:?}"), format!("{provider:?}")] {
        assert!(text.contains("..") && !text.contains("hidden"), "{text}");
    }
    let meter = || Arc::new(CallMeter::default());
    let plain = Config { endpoint: Some("http://management.example.com".to_owned()), ..config.clone() };
    assert!(matches!(Azure::new(&plain, meter()), Err(ConfigError::Endpoint(_))));
    let wrong = Config { resource_group: "a/b".to_owned(), ..config.clone() };
    assert!(matches!(Azure::new(&wrong, meter()), Err(ConfigError::Name { field: "resourceGroup", .. })));
    let CredentialSource::Secret { tenant, client, secret, .. } = source else { panic!("a secret") };
    let source = CredentialSource::Secret { authority: "http://login.example.com".into(), tenant, client, secret };
    assert_eq!(kind(observe(&bench, &with(&bench, source)).await), ErrorKind::Credentials);
}
