-- stg_problems: the good rows, with the identity of their question.
-- Grain: one row per good source row; a problem_id may occur more than once.
--   problem_id  varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   others      as in stg_rows
with final as (
    select
        substr(sha256(normalised), 1, 16) as problem_id,
        * exclude (reason, row_text)
    from stg_rows
    where reason is null
)

select * from final
