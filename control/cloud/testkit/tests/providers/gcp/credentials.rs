//! Credentials.

use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tempfile::TempDir;
use vipgate_cloud::gcp::{Config, CredentialSource, Gcp};
use vipgate_cloud::{CloudError, ErrorKind, Observation, Provider};
use vipgate_cloud_testkit::{Fault, RecordedRequest, Reply};

use crate::gcp::bench::{Bench, config, kind};

/// Made for these tests; no account has it.
const PRIVATE_KEY: &str = include_str!("test-key.pem");
const PUBLIC_KEY: &str = include_str!("test-key.pub");

/// The fake with credentials of a file.
struct File {
    bench: Bench,
    folder: TempDir,
    provider: Gcp,
}

impl File {
    async fn new(content: impl FnOnce(&str, &Path) -> Value) -> Self {
        let (bench, folder) = (Bench::new().await, tempfile::tempdir().expect("a folder"));
        let path = folder.path().join("credentials.json");
        let content = content(&bench.server.url(), folder.path());
        std::fs::write(&path, content.to_string()).expect("written");
        let config = Config { credentials: CredentialSource::File(path), ..config(&bench.server.url()) };
        let provider = Gcp::new(&config, Arc::default()).expect("a valid configuration");
        Self { bench, folder, provider }
    }

    async fn observe(&self) -> Result<Observation, CloudError> {
        self.provider.observe(&Bench::scope()).await
    }

    fn tokens(&self) -> Vec<RecordedRequest> {
        let is_token = |request: &RecordedRequest| !request.path.starts_with("/compute/");
        self.bench.server.take_log().into_iter().filter(is_token).collect()
    }
}

fn key_file(url: &str, _folder: &Path) -> Value {
    json!({
        "type": "service_account",
        "project_id": "p1",
        "private_key_id": "key-1",
        "private_key": PRIVATE_KEY,
        "client_email": "gw@p1.iam.gserviceaccount.com",
        "token_uri": format!("{url}/token"),
    })
}

fn federation(url: &str, source: &Value) -> Value {
    json!({
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/k",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": format!("{url}/sts/v1/token"),
        "credential_source": source,
    })
}

#[tokio::test]
async fn a_token_of_the_metadata_server_is_used_until_it_ends() {
    let bench = Bench::new().await;
    bench.observe().await;
    bench.observe().await;
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()), 1);
    let log = bench.server.take_log();
    let token = log.iter().find(|it| it.path.starts_with("/computeMetadata/")).expect("a request for a token");
    assert_eq!(token.header("metadata-flavor"), Some("Google"));
    assert_eq!(token.parameter("scopes"), Some("https://www.googleapis.com/auth/compute"));
    assert!(log.iter().any(|it| it.header("authorization") == Some("Bearer token-1")));
    // Seconds that are over at once: a new one for each request.
    bench.server.with(|cloud| {
        cloud.tokens.valid.clear();
        cloud.tokens.lifetime = 0;
    });
    bench.observe().await;
    assert!(bench.server.with(|cloud| cloud.tokens.issued()) > 2);
}

#[tokio::test]
async fn a_refused_token_is_replaced_once() {
    let bench = Bench::new().await;
    bench.observe().await;
    bench.server.with(|cloud| cloud.tokens.valid.clear());
    bench.read_once().await.expect("read with a new token");
    assert_eq!(bench.server.with(|cloud| cloud.tokens.issued()), 2);
    let refuse = Fault::Reply(Reply::json(401, &json!({ "error": { "code": 401, "message": "m" } })));
    bench.server.plan_fault(20, refuse, |request| request.path.starts_with("/compute/"));
    bench.server.take_log();
    assert_eq!(kind(bench.read_once().await), ErrorKind::Credentials);
    assert_eq!(bench.requests().len(), 2);
}

#[tokio::test]
async fn a_service_account_signs_its_assertion() {
    let file = File::new(key_file).await;
    file.observe().await.expect("an observation");
    let tokens = file.tokens();
    assert_eq!(tokens.len(), 1);
    let form = tokens[0].form();
    let assertion = &form.iter().find(|(name, _)| name == "assertion").expect("an assertion").1;
    let parts: Vec<&str> = assertion.split('.').collect();
    let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).expect("base64url");
    let header: Value = serde_json::from_slice(&decode(parts[0])).expect("JSON");
    let claims: Value = serde_json::from_slice(&decode(parts[1])).expect("JSON");
    assert_eq!(header, json!({ "alg": "RS256", "typ": "JWT", "kid": "key-1" }));
    assert_eq!(claims["iss"], "gw@p1.iam.gserviceaccount.com");
    assert_eq!(claims["aud"], format!("{}/token", file.bench.server.url()));
    assert_eq!(claims["exp"].as_i64().expect("a number") - claims["iat"].as_i64().expect("a number"), 3600);
    let public = STANDARD.decode(PUBLIC_KEY.trim()).expect("base64");
    let public = ring::signature::UnparsedPublicKey::new(&ring::signature::RSA_PKCS1_2048_8192_SHA256, public);
    let signed = format!("{}.{}", parts[0], parts[1]);
    public.verify(signed.as_bytes(), &decode(parts[2])).expect("a valid signature");
}

#[tokio::test]
async fn federation_exchanges_the_token_of_a_file_which_is_read_each_time() {
    let file = File::new(|url, folder| {
        std::fs::write(folder.join("token"), "subject-1\n").expect("written");
        federation(url, &json!({ "file": folder.join("token") }))
    })
    .await;
    file.bench.server.with(|cloud| cloud.tokens.lifetime = 0);
    file.observe().await.expect("an observation");
    std::fs::write(file.folder.path().join("token"), "subject-2").expect("written");
    file.bench.server.with(|cloud| cloud.tokens.subjects = ["subject-2".to_owned()].into());
    file.tokens();
    file.observe().await.expect("an observation");
    let subject = |request: &RecordedRequest| request.form().into_iter().find(|(name, _)| name == "subject_token");
    let subjects: Vec<_> = file.tokens().iter().filter_map(subject).map(|(_, value)| value).collect();
    assert!(!subjects.is_empty() && subjects.iter().all(|it| it == "subject-2"), "{subjects:?}");
}

#[tokio::test]
async fn federation_reads_urls_and_impersonates_a_service_account() {
    let file = File::new(|url, _| {
        let format = json!({ "type": "json", "subject_token_field_name": "token" });
        let source = json!({ "url": format!("{url}/subject"), "headers": { "x-source": "test" }, "format": format });
        let mut account = federation(url, &source);
        account["service_account_impersonation_url"] =
            json!(format!("{url}/v1/projects/-/serviceAccounts/gw@p1.iam.gserviceaccount.com:generateAccessToken"));
        account
    })
    .await;
    file.observe().await.expect("an observation");
    file.observe().await.expect("an observation");
    let tokens = file.tokens();
    let paths: Vec<&str> = tokens.iter().map(|it| it.path.as_str()).collect();
    let impersonate = "/v1/projects/-/serviceAccounts/gw@p1.iam.gserviceaccount.com:generateAccessToken";
    assert_eq!(paths, ["/subject", "/sts/v1/token", impersonate]);
    assert_eq!(tokens[2].header("authorization"), Some("Bearer token-1"));
    assert_eq!(tokens[2].json(), json!({ "scope": ["https://www.googleapis.com/auth/compute"], "lifetime": "3600s" }));
}

#[tokio::test]
async fn credentials_that_are_not_given_are_errors_without_a_secret() {
    let broken: [(&str, Value); 5] = [
        (
            "a key that isn't one",
            json!({ "private_key": "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----" }),
        ),
        ("plain HTTP", json!({ "token_uri": "http://oauth2.example.com/secret" })),
        ("no field", json!({ "client_email": null })),
        ("another type", json!({ "type": "authorized_user", "refresh_token": "secret" })),
        ("a missing PEM", json!({ "private_key": "secret" })),
    ];
    for (what, change) in broken {
        let file = File::new(|url, folder| {
            let mut content = key_file(url, folder);
            for (key, value) in change.as_object().expect("an object") {
                content[key] = value.clone();
            }
            content
        })
        .await;
        let error = file.observe().await.expect_err(what);
        assert_eq!(error.kind, ErrorKind::Credentials, "{what}");
        assert!(!format!("{error} {error:?} {:?}", file.provider).contains("secret"), "{what}: {error}");
        assert!(file.tokens().is_empty(), "{what}");
    }
    let aws = json!({ "environment_id": "aws1", "url": "http://169.254.169.254/latest/meta-data" });
    let file = File::new(|url, _| federation(url, &aws)).await;
    assert!(file.observe().await.expect_err("not supported").message.contains("AWS"));
    let file = File::new(|url, folder| {
        std::fs::write(folder.join("token"), "unknown-secret").expect("written");
        federation(url, &json!({ "file": folder.join("token") }))
    })
    .await;
    let error = file.observe().await.expect_err("refused");
    assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Credentials, "invalid_grant"));
    assert!(!format!("{error:?}").contains("secret") && !error.message.contains("quoted"), "{error:?}");
}

#[tokio::test]
async fn a_token_server_that_fails_once_is_asked_again() {
    let bench = Bench::new().await;
    let fault = Fault::Reply(Reply::text(503, "text/html", "out of order".to_owned()));
    bench.server.plan_fault(1, fault, |request| request.path.starts_with("/computeMetadata/"));
    assert_eq!(bench.observe().await.addresses.len(), 2);
}
