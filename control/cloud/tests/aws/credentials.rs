//! Where keys come from, and what happens when they end.

use std::io::Write;

use vipgate_cloud::aws::CredentialSource;
use vipgate_cloud::{Associate, ErrorKind, Provider};

use vipgate_cloud_testkit::aws::FakeAws;

use crate::world::{World, provider};

#[tokio::test]
async fn keys_of_the_instances_role_are_got_by_a_token_and_anew_when_they_are_refused() {
    let world = World::new(1).await;
    let source = CredentialSource::Instance { imds: world.fake.url() };
    let provider = provider(&world.fake.url(), Associate::Nic, source);
    provider.observe(&world.scope).await.unwrap();
    let paths: Vec<String> = world.fake.take_log().into_iter().map(|request| request.path).take(3).collect();
    let roles = "/latest/meta-data/iam/security-credentials/";
    assert_eq!(paths, ["/latest/api/token".to_owned(), roles.to_owned(), format!("{roles}gateway-role")]);
    provider.observe(&world.scope).await.unwrap();
    assert!(world.fake.take_log().iter().all(|request| request.path == "/"), "keys are kept");
    world.fake.with(FakeAws::expire_keys);
    provider.observe(&world.scope).await.unwrap();
    assert!(world.fake.take_log().iter().any(|request| request.path.ends_with("gateway-role")));
}

#[tokio::test]
async fn the_token_of_a_web_identity_is_read_each_time() {
    let world = World::new(1).await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"old-token\n").unwrap();
    let source = CredentialSource::WebIdentity {
        token_file: file.path().to_owned(),
        role: "arn:aws:iam::1:role/vipgate".to_owned(),
        sts: world.fake.url(),
    };
    let provider = provider(&world.fake.url(), Associate::Nic, source);
    let error = provider.observe(&world.scope).await.unwrap_err();
    assert_eq!((error.kind, &*error.code), (ErrorKind::Credentials, "InvalidIdentityToken"));
    assert!(!error.to_string().contains("old-token"));
    std::fs::write(file.path(), "good-token").unwrap();
    provider.observe(&world.scope).await.unwrap();
}

#[tokio::test]
async fn without_a_metadata_server_the_error_names_it() {
    let world = World::new(1).await;
    let source = CredentialSource::Instance { imds: "http://127.0.0.1:1".to_owned() };
    let provider = provider(&world.fake.url(), Associate::Nic, source);
    let error = provider.observe(&world.scope).await.unwrap_err();
    assert_eq!((error.kind, &*error.code), (ErrorKind::Credentials, "NotReachable"));
    assert!(error.message.contains("127.0.0.1"), "{error}");
}

#[test]
fn the_environment_names_the_source() {
    let source = |variables: &[(&str, &str)]| {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        CredentialSource::from_environment("eu-west-1", variable).name()
    };
    assert_eq!(source(&[]), "instance metadata");
    assert_eq!(source(&[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")]), "environment");
    assert_eq!(source(&[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "")]), "instance metadata");
    assert_eq!(source(&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/t"), ("AWS_ROLE_ARN", "r")]), "web identity");
    assert_eq!(source(&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1")]), "container credentials");
    let keys = [("AWS_ACCESS_KEY_ID", "AKIA"), ("AWS_SECRET_ACCESS_KEY", "s3cret")];
    let variable = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let text = format!("{:?}", CredentialSource::from_environment("eu-west-1", variable));
    assert!(!text.contains("s3cret"), "{text}");
}
