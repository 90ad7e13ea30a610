"""Written forms of secrets that are in no manifest and no recipe, and of harmless strings that stay as they are."""

from __future__ import annotations

import base64
import json
import time

import pytest

from paceline.contract.errors import RecipeError
from paceline.contract.redaction import HIDDEN, redacted, redacted_command, without_credentials
from paceline.recipe import Recipe

MARK = "Zq7"
"""Part of every secret here: where it is gone, the secret is."""

RANDOM = "Zq7mW2xR9kT4vB8nL3pY6dF1"
HEX = "c3a7" * 8
LOGIN = base64.b64encode(b"user:Zq7-secret").decode()
PEM_TEXT = f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{MARK}abc/def\nxyz{MARK}=\n-----END RSA PRIVATE KEY-----"
SERVICE_ACCOUNT = json.dumps({"type": "service_account", "private_key_id": "1", "private_key": PEM_TEXT})

SHAPES = {
    "hugging face": f"hf_{RANDOM}",
    "organisation": f"api_org_{RANDOM}",
    "openai": f"sk-proj-{RANDOM}",
    "anthropic": f"sk-ant-api03-{RANDOM}-{RANDOM}",
    "github": f"ghp_{RANDOM}",
    "github fine": f"github_pat_{RANDOM}",
    "github app": f"ghs_{RANDOM}",
    "gitlab": f"glpat-{RANDOM}",
    "gitlab runner": f"glrt-{RANDOM}",
    "slack bot": f"xoxb-1234-5678-{RANDOM}",
    "slack app": f"xapp-1-A1-2-{RANDOM}",
    "aws": "AKIAZq7".replace("Zq7", "IOSFODNN7EXAMPLE"),
    "google": f"AIza{RANDOM}",
    "google oauth": f"ya29.a0{RANDOM}-{RANDOM}",
    "google refresh": f"1//0g{RANDOM}",
    "google client": f"GOCSPX-{RANDOM}",
    "azure client": f"abc8Q~{RANDOM}~{RANDOM}",
    "sendgrid": f"SG.{RANDOM}.{RANDOM}",
    "mailgun": f"key-{HEX}",
    "mailchimp": f"{HEX}-us21",
    "twilio": f"SK{HEX}",
    "stripe": f"rk_live_{RANDOM}",
    "stripe webhook": f"whsec_{RANDOM}",
    "square": f"sq0csp-{RANDOM}",
    "shopify": f"shpat_{HEX}",
    "npm": f"npm_{RANDOM}",
    "pypi": f"pypi-AgEI{RANDOM}",
    "rubygems": f"rubygems_{HEX}",
    "docker": f"dckr_pat_{RANDOM}",
    "databricks": f"dapi{HEX}",
    "digital ocean": f"dop_v1_{HEX}{HEX}",
    "vault": f"hvs.{RANDOM}",
    "terraform": f"abcdefghijklmn.atlasv1.{RANDOM}{RANDOM}",
    "pulumi": f"pul-{HEX}",
    "doppler": f"dp.pt.{RANDOM}",
    "postman": f"PMAK-{RANDOM}",
    "new relic": f"NRAK-{RANDOM}",
    "grafana": f"glsa_{RANDOM}",
    "sentry": f"sntrys_{RANDOM}",
    "atlassian": f"ATATT3x{RANDOM}",
    "linear": f"lin_api_{RANDOM}",
    "notion": f"ntn_{RANDOM}",
    "airtable": f"patabcdefghijklmn.{HEX}{HEX}",
    "telegram": f"123456789:AA{RANDOM}{RANDOM}",
    "discord bot": f"MTE4{RANDOM}.GZq7mW.{RANDOM}{RANDOM}",
    "facebook": f"EAA{RANDOM}{RANDOM}",
    "groq": f"gsk_{RANDOM}",
    "replicate": f"r8_{RANDOM}",
    "age": f"AGE-SECRET-KEY-1{MARK}{RANDOM.upper()}",
    "jwt": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{RANDOM}",
    "pem": PEM_TEXT,
    "pem in a line": PEM_TEXT.replace("\n", "\\n"),
    "pem cut off": PEM_TEXT[:60],
    "ssh": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{MARK}",
    "slack webhook": f"https://hooks.slack.com/services/T012/B345/{RANDOM}",
    "discord webhook": f"https://discord.com/api/webhooks/123456/{RANDOM}",
    "teams webhook": f"https://acme.webhook.office.com/webhookb2/{HEX}@{HEX}/IncomingWebhook/{RANDOM}/1",
    "old teams webhook": f"https://outlook.office.com/webhook/{HEX}@{HEX}/IncomingWebhook/{RANDOM}/1",
    "zapier": f"https://hooks.zapier.com/hooks/catch/123/{RANDOM}",
    "ifttt": f"https://maker.ifttt.com/trigger/done/with/key/{RANDOM}",
    "slack webhook alone": f"hooks.slack.com/services/T012/B345/{RANDOM}",
    "mattermost": f"https://chat.acme.org/hooks/{RANDOM}",
    "url": f"https://user:{MARK}@host/rows.csv",
    "url slash": f"postgres://user:{MARK}/a/{MARK}@db.host/rows",
    "url slashes and at": f"https://user:a/{MARK}@b/c@host/rows.csv",
    "url without user": f"redis://:{MARK}@host:6379/0",
    "mongo": f"mongodb+srv://u:{MARK}@cluster0.abc.mongodb.net/db",
    "query": f"https://host/rows.csv?sv=1&sig={MARK}&se=2",
    "query token": f"https://host/rows.csv?access_token={MARK}",
    "fragment": f"https://host/#access_token={MARK}&x=1",
    "google chat": f"https://chat.googleapis.com/v1/spaces/A/messages?key=k&token={MARK}",
    "amazon link": f"https://b.s3.amazonaws.com/x?X-Amz-Credential={MARK}&X-Amz-Signature={MARK}",
    "bearer": f"Authorization: Bearer {MARK}.abc",
    "bare bearer": f"Bearer {RANDOM}",
    "basic": f"Authorization: Basic {LOGIN}",
    "bare basic": f"Basic {LOGIN}",
    "cookie": f"Cookie: session={MARK}; other={MARK}",
    "set-cookie": f"Set-Cookie: id={MARK}; Path=/",
    "x-api-key": f"X-Api-Key: {MARK}",
    "x-auth-token": f"x-auth-token: {MARK}",
    "private-token": f"PRIVATE-TOKEN: {MARK}",
    "json header": json.dumps({"Authorization": f"Bearer {MARK}.abc"}),
    "json in json": json.dumps(json.dumps({"X-Api-Key": MARK})),
    "password": f"password={MARK}-and-more",
    "json password": json.dumps({"password": f"{MARK} with blanks"}),
    "yaml password": f"password: '{MARK} with blanks'",
    "api key": f'api_key: "{MARK}-abcdef"',
    "access token": f"access_token={MARK}-abcdef",
    "client secret": f"client_secret: {MARK}-abcdef",
    "azure storage": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={MARK}abc/def==;EndpointSuffix=x",
    "service account": SERVICE_ACCOUNT,
}
"""Secrets wherever they stand: in a command, a recipe, a message."""

ASSIGNED = {
    "pass:": f"pass:{MARK}",
    "pass": f"pass: {MARK} and the rest of it {MARK}",
    "pw": f"pw={MARK}",
    "db.pw": f"db.pw={MARK}",
    "token": f"token={MARK}",
    "TOKEN": f"TOKEN={MARK}",
    "camel": f"accessToken={MARK}",
    "apiKey": f'"apiKey":"{MARK}"',
    "option": f"train --hub-token {MARK} --resume",
    "login": f"curl -u user:{MARK} https://host",
    "escaped": json.dumps(json.dumps({"token": f"{MARK} x"})),
    "yaml": f"hub:\n  token: {MARK}\n  layers: 2",
    "flow": f"{{auth_token: {MARK} {MARK}, layers: 2}}",
    "session": f"sessionid={MARK}",
    "cookie": f"cookie={MARK}",
    "jwt": f"jwt={MARK}",
    "dsn": f"dsn={MARK}",
    "webhook": f"webhook_url={MARK}",
    "connection": f"connection_string={MARK}",
    "signature": f"SharedAccessSignature sr=a&sig={MARK}&se=1",
    "scheme-less": f"user:{MARK}@db.host:5432",
    "wandb": f"WANDB_API_KEY={MARK}{HEX}",
    "change": f"x.token: a -> {MARK}",
    "random": RANDOM,
    "random url-safe": f"{RANDOM[:14]}-{RANDOM}_{RANDOM[:9]}",
    "aws secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYZq7MPLEKEY",
    "base64": "Zq7XUtnFEMI/K7MDENG+bPxRfiCY==",
    "within": f"run-of-{RANDOM}",
}
"""Secrets in settings and arguments, where names like token say what the value is."""

HARMLESS = [
    "/data/reviews/train.csv",
    "https://host/path@branch/file.csv",
    "http://localhost:8080/a@b/rows.csv",
    "hub:user/data@main",
    "model.revision=0123456789abcdef0123456789abcdef01234567",
    "c9b6f0a1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6e7f8a9",
    "sha256:c9b6f0a1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6e7f8a9",
    "runs/3f2504e0-4f89-41d3-9a0c-0305e82c3301",
    "runs/3F2504E0-4F89-41D3-9A0C-0305E82C3301",
    "runs/reviews-2026-01-02T10-20-30Z",
    "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
    "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B-Q4KM",
    "transformers.models.distilbert.modeling_distilbert:DistilBertForSequenceClassification",
    "BertBase2Run7Checkpoint12Final3",
    "~/.cache/huggingface/hub/models--bert-base-uncased/snapshots/0123456789abcdef0123456789abcdef01234567",
    "/tmp/pytest-of-root/pytest-12/test_secrets_never_reach_the_m0/run",
    "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T/tmpab12cd34",
    "task-classification-of-many-reviews",
    "risk-assessment-of-mortgages-2026",
    "global-classification-of-reviews-1",
    "mask-language-modelling-for-reviews",
    "optimizer.groups=[{match: '*key.weight', lr: 1e-4}]",
    "model.config={model_type: bert, pad_token_id: 0, cls_token: '[CLS]'}",
    "model.tokenizer=bert-base-uncased",
    "max_tokens=512",
    "keywords=reviews",
    "monkey=3",
    "path=1",
    "author=x",
    "sigma=2",
    "bypass=true",
    "compass=north",
    "the bearer of this is a friend",
    "basic training in sessions: three",
    "mailto:someone@host.org",
    "someone@host.org",
    "git@github.com:org/repository.git",
    "2026-01-02 10:20:30",
    "12:30@noon",
    "a wonderful evening; the password was never asked for",
    "--resume",
    "--tokenizer bert-base-uncased",
    "hooks.d/run.sh",
    "",
]


@pytest.mark.parametrize("name", SHAPES)
def test_a_secret_is_hidden_wherever_it_stands(name: str) -> None:
    secret = SHAPES[name]
    parts = [part for part in (MARK, HEX, "IOSFODNN7EXAMPLE", LOGIN) if part in secret]
    assert parts, "nothing to look for"
    for text in (secret, f"see {secret}", f"--set=a.b={secret}", f'{{"note": "x", "b": 1}} {secret}'):
        for hide in (redacted, without_credentials, lambda text: " ".join(redacted_command(["--note", text]))):
            shown = hide(text)
            assert not any(part in shown for part in parts), shown
            assert HIDDEN in shown


@pytest.mark.parametrize("name", ASSIGNED)
def test_a_setting_that_names_a_secret_loses_its_value(name: str) -> None:
    for text in (ASSIGNED[name], f"--set={ASSIGNED[name]}"):
        assert MARK not in redacted(text), redacted(text)
        assert HIDDEN in redacted(text)
        assert MARK not in " ".join(redacted_command(["paceline", "train", "--set", text]))


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text
    assert without_credentials(text) == text
    assert redacted_command(["paceline", text]) == ["paceline", text]


@pytest.mark.parametrize(
    "command",
    [
        ["--token", MARK],
        ["--hub-token", f"-{MARK}"],
        [f"--password=with blanks, {MARK}"],
        ["--pass", MARK],
        ["--pw", MARK],
        ["-u", f"user:{MARK}"],
        ["--user", f"user:{MARK}:{MARK}"],
        ["-H", f"Cookie: a={MARK}"],
        ["--header", f"X-Api-Key: {MARK}"],
        [f"API_TOKEN={MARK}", "paceline"],
    ],
    ids=" ".join,
)
def test_options_that_take_a_secret(command: list[str]) -> None:
    assert MARK not in " ".join(redacted_command(command))


def test_what_is_hidden_stays_so() -> None:
    for name, secret in {**SHAPES, **ASSIGNED}.items():
        once = redacted(secret)
        assert redacted(once) == once, name
        assert without_credentials(once) == once, name
    assert without_credentials(f"password = {HIDDEN}: unknown key") == f"password = {HIDDEN}: unknown key"


def test_what_stands_beside_a_secret_stays() -> None:
    assert redacted("{auth_token: abc, layers: 2}") == f"{{auth_token: {HIDDEN}, layers: 2}}"
    assert redacted("hub:\n  token: abc\n  layers: 2") == f"hub:\n  token: {HIDDEN}\n  layers: 2"
    assert without_credentials("postgres://u:a/b@host/rows") == f"postgres://{HIDDEN}@host/rows"
    assert redacted("https://hooks.slack.com/services/T012/B345/abc") == f"https://hooks.slack.com/{HIDDEN}"


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_with_a_secret_is_refused(name: str) -> None:
    settings = {"model": {"source": "m", "config": {"model_type": "bert", "note": SHAPES[name]}}}
    with pytest.raises(RecipeError, match="holds a secret") as error:
        Recipe.parse(settings)
    assert MARK not in str(error.value)


@pytest.mark.parametrize("name", ["api_key", "password", "access_token", "X-Api-Key", "Authorization"])
def test_a_recipe_with_a_value_of_a_secret_name_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="holds a secret"):
        Recipe.parse({"model": {"source": "m", "config": {name: f"{MARK}-abcdef"}}})


@pytest.mark.parametrize("text", [text for text in HARMLESS if text])
def test_a_recipe_without_one_is_read(text: str) -> None:
    config = {"model_type": "bert", "note": text, "pad_token": "[PAD]", "use_auth_token": True, "key_value_heads": 2}
    Recipe.parse({"model": {"source": "m", "config": config}, "data": {"source": text}})


@pytest.mark.parametrize("piece", ["a", "a.", "token", "a=", "://", "?a&", "a:", "-", "Aa1", "b a", '"', "\\"])
def test_long_texts_take_no_square_of_their_length(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    began = time.process_time()
    redacted(text), without_credentials(text), redacted_command([text])
    assert time.process_time() - began < 3
