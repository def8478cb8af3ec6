//! Where keys come from, and what happens when they end.

use std::io::Write;

use vipgate_cloud::aws::{ContainerToken, CredentialSource};
use vipgate_cloud::{Associate, ErrorKind, Provider};

use vipgate_cloud_testkit::aws::{AGENT_TOKEN, FakeAws};

use crate::aws::world::{World, provider};

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
async fn an_agent_of_containers_gets_its_token() {
    let world = World::new(1).await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(AGENT_TOKEN.as_bytes()).unwrap();
    let url = format!("{}/v1/credentials", world.fake.url());
    let tokens =
        [ContainerToken::File(file.path().to_owned()), ContainerToken::Value(AGENT_TOKEN.to_owned())].into_iter();
    for token in tokens {
        let source = CredentialSource::Container { url: url.clone(), token };
        provider(&world.fake.url(), Associate::Nic, source).observe(&world.scope).await.unwrap();
    }
    let source = CredentialSource::Container { url, token: ContainerToken::None };
    let refused = provider(&world.fake.url(), Associate::Nic, source).observe(&world.scope).await.unwrap_err();
    assert_eq!((refused.kind, &*refused.code), (ErrorKind::Credentials, "401"));
}

#[tokio::test]
async fn no_token_is_sent_by_http_to_another_host() {
    let world = World::new(1).await;
    for (url, is_refused) in [
        ("http://192.0.2.1/credentials", true),
        ("http://169.254.170.2.example.com/credentials", true),
        ("http://[fd00:ec2::24]/credentials", true),
        ("ftp://127.0.0.1/credentials", true),
        // These are asked, in vain.
        ("http://127.0.0.1:1/credentials", false),
        ("https://127.0.0.1:1/credentials", false),
        ("http://169.254.170.2:1/credentials", false),
        ("http://169.254.170.23:1/credentials", false),
        ("http://[fd00:ec2::23]:1/credentials", false),
    ] {
        let source =
            CredentialSource::Container { url: url.to_owned(), token: ContainerToken::Value("s3cret".to_owned()) };
        let error = provider(&world.fake.url(), Associate::Nic, source).observe(&world.scope).await.unwrap_err();
        assert_eq!((error.kind, error.code == "Url"), (ErrorKind::Credentials, is_refused), "{url}: {error}");
        assert!(!error.to_string().contains("s3cret"));
    }
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
    assert_eq!(source(&[("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/1")]), "container credentials");
    let keys = [("AWS_ACCESS_KEY_ID", "AKIA"), ("AWS_SECRET_ACCESS_KEY", "s3cret")];
    let variable = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let text = format!("{:?}", CredentialSource::from_environment("eu-west-1", variable));
    assert!(!text.contains("s3cret"), "{text}");
}

fn source(region: &str, variables: &[(&str, &str)]) -> CredentialSource {
    let variable = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    CredentialSource::from_environment(region, variable)
}

#[test]
fn the_agent_of_ecs_is_named_by_a_path_and_its_token_by_a_variable() {
    let relative = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/1");
    let full = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://169.254.170.23/v1/credentials");
    let value = ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "token");
    let file = ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/token");
    let container = |variables: &[(&str, &str)]| match source("eu-west-1", variables) {
        CredentialSource::Container { url, token } => (url, token),
        other => panic!("{other:?}"),
    };
    let (url, token) = container(&[full, relative, value]);
    assert_eq!(url, "http://169.254.170.2/v2/credentials/1");
    assert!(matches!(token, ContainerToken::Value(value) if value == "token"));
    let (url, token) = container(&[full, value, file]);
    assert_eq!(url, full.1);
    assert!(matches!(token, ContainerToken::File(file) if file.ends_with("token")));
    assert!(matches!(container(&[full]).1, ContainerToken::None));
}

#[test]
fn regions_of_china_have_a_domain_of_their_own_and_the_metadata_server_any_address() {
    let variables = [("AWS_WEB_IDENTITY_TOKEN_FILE", "/t"), ("AWS_ROLE_ARN", "r")];
    for (region, url) in [
        ("eu-west-1", "https://sts.eu-west-1.amazonaws.com"),
        ("cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "https://sts.us-gov-west-1.amazonaws.com"),
    ] {
        let web = source(region, &variables);
        assert!(matches!(&web, CredentialSource::WebIdentity { sts, .. } if sts == url), "{region}");
    }
    let v6 = source("eu-west-1", &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://[fd00:ec2::254]/")]);
    assert!(matches!(v6, CredentialSource::Instance { imds } if imds == "http://[fd00:ec2::254]"));
}
